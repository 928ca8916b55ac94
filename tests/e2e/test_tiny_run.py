"""A whole run with a real vLLM on CPU: launcher, trainer, generator, actor, and the audit of what they recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from inflight.metrics import EVAL_FILE, METRICS_FILE, read_lines
from inflight.report import summary
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader
from inflight.tasks.addition import Addition

pytestmark = pytest.mark.vllm

STEPS = 8
START_TIMEOUT_S = 420.0
RUN_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 90.0
SLOW_MACHINE = ("publish.join_timeout_s=400", "generator.start_timeout_s=400")
AUDIT_TOLERANCE = 1e-4
"""Nats; float32 on both sides."""


SHELL = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "SLURM_PROCID": "1",
    "VLLM_PORT": "29500",
}
"""What torchrun, accelerate and Slurm leave in an environment: a run would wait for ranks that are never started."""


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    # As a user would, from a shell on a cluster: tests that run an engine in this process have set vLLM's variables.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | SHELL
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "inflight.launcher",
            "--config-name",
            "tiny",
            f"run_dir={run_dir}",
            *SLOW_MACHINE,
            *overrides,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "HF_HUB_OFFLINE": "1"},
    )


def logs(run_dir: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted((run_dir / "logs").glob("*.log")))


def still_alive(processes: list[psutil.Process]) -> list[str]:
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(" ".join(process.cmdline())[:200] or process.name())
        except psutil.NoSuchProcess:
            continue
    return alive


def processes_of(run_dir: Path) -> list[str]:
    """Processes anywhere on this machine whose command line names the run folder."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if str(run_dir) in command and process.pid != os.getpid():
            found.append(command)
    return found


def wait_for_steps(launcher: subprocess.Popen[str], run_dir: Path, steps: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(read_lines(run_dir / METRICS_FILE)) < steps:
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.send_signal(signal.SIGTERM)
            output = launcher.communicate(timeout=60)[0]
            pytest.fail(f"no step {steps} within {START_TIMEOUT_S:.0f} s\n{output}\n{logs(run_dir)}")
        time.sleep(0.5)


def titled(processes: list[psutil.Process], title: str) -> list[psutil.Process]:
    """Those that live and have set a title (their whole command line) that begins so."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


def wait_for_engine(launcher: subprocess.Popen[str], run_dir: Path, title: str = "VLLM::") -> list[psutil.Process]:
    """All processes of the run once one of vLLM's, whose command line begins with `title`, is among them."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and launcher.poll() is None:
        everyone = psutil.Process(launcher.pid).children(recursive=True)
        if titled(everyone, title):
            return everyone
        time.sleep(0.2)
    launcher.send_signal(signal.SIGTERM)
    pytest.fail(f"no engine came\n{launcher.communicate(timeout=60)[0]}\n{logs(run_dir)}")


BUSY = ("generator.max_num_seqs=2", "gate.max_lag=0", "trainer.learning_rate=1e-4")
"""So that the generator is busy when a version comes, also where it outruns the trainer: few sequences at once, none
ahead of the trainer, and steps so small that the model does not learn to answer in a few tokens."""
EVALUATED = ("eval.every=3", "task.options.held_out=12", "eval.sampling.max_tokens=16")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """A finished run and what its launcher printed."""
    run_dir = tmp_path_factory.mktemp("e2e") / "run"
    launcher = start(run_dir, f"trainer.steps={STEPS}", *BUSY, *EVALUATED)
    try:
        output, _ = launcher.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        launcher.send_signal(signal.SIGTERM)
        pytest.fail(f"the run did not end\n{launcher.communicate(timeout=60)[0]}\n{logs(run_dir)}")
    assert launcher.returncode == 0, f"{output}\n{logs(run_dir)}"
    return run_dir, output


def test_every_version_is_swapped_in_and_nothing_is_aborted(run):
    run_dir, output = run
    result = summary.read(run_dir)
    assert result.steps == STEPS
    assert result.version == STEPS
    # A version that comes while another is being committed is passed over when a third is there before it was sent.
    passed_over = result.swaps_superseded
    assert result.swaps + passed_over >= STEPS - 1, "only the last version may find the generator stopping"
    assert result.swaps > STEPS / 2
    assert result.swaps_failed == 0
    assert result.aborted == 0
    assert result.groups_failed == {}
    assert result.torn_tail is None
    assert f"{result.swaps}, {result.swaps_while_running} of them while sequences ran" in output


def test_its_report_is_written(run):
    page = (run[0] / "report.html").read_text()
    assert f"complete, {STEPS} of {STEPS} steps" in page
    assert '"id":"q0/0"' in page
    assert '"libraries.torch"' in page
    assert f"report      {run[0] / 'report.html'}" in run[1]


def test_sequences_span_versions(run):
    result = summary.read(run[0])
    assert result.swaps_while_running >= 1
    assert result.mixed_rollouts >= 1


def test_versions_are_evaluated_under_their_own_tags_while_training_continues(run):
    run_dir, _ = run
    lines = read_lines(run_dir / EVAL_FILE)
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        assert (line["version"], line["generator"], line["eval/answers"]) == (line["step"], "g0", 12)
        assert (line["eval/mixed"], line["eval/failed_by"]) == (0, {})
        assert 0 <= line["eval/pass@1"] <= line["eval/reward"] <= 1
    held_out = {Addition(seed=0, held_out=12).held_out_item(index).key for index in range(12)}
    assert not held_out & {group.prompt_key for group in Reader(run_dir / ROLLOUTS_FILE)}, "never trained on"
    assert len(list((run_dir / "best").glob("step-*/model.safetensors"))) == 1


def test_every_group_is_accounted_for(run):
    steps = read_lines(run[0] / METRICS_FILE)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))


def test_the_audit_finds_every_tag_right(run):
    done = subprocess.run(
        [sys.executable, "-m", "inflight.cli", "audit", str(run[0])],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_process_is_left(run):
    assert processes_of(run[0]) == []
    assert not (run[0] / "bus").exists()


def assert_gone(everyone: list[psutil.Process], run_dir: Path) -> None:
    assert still_alive(everyone) == []
    assert processes_of(run_dir) == []
    assert not (run_dir / "bus").exists()


def test_ctrl_c_while_vllm_starts_leaves_nothing_behind(tmp_path):
    run_dir = tmp_path / "run"
    launcher = start(run_dir)
    everyone = wait_for_engine(launcher, run_dir)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=STOP_TIMEOUT_S)
    assert launcher.returncode == 128 + signal.SIGINT, output
    assert_gone(everyone, run_dir)


def test_ctrl_c_while_it_trains_leaves_nothing_behind(tmp_path):
    run_dir = tmp_path / "run"
    launcher = start(run_dir, "trainer.steps=1000")
    wait_for_steps(launcher, run_dir, 1)
    everyone = psutil.Process(launcher.pid).children(recursive=True)
    assert len(everyone) >= 5, "trainer, generator with its engine core and worker, actor"
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=STOP_TIMEOUT_S)
    assert launcher.returncode == 128 + signal.SIGINT, output
    assert_gone(everyone, run_dir)
    assert json.loads((run_dir / summary.SUMMARY_FILE).read_text())["steps"] >= 1


def test_a_killed_worker_ends_the_run(tmp_path):
    """The engine dies of it, the generator says so, the launcher shows it and stops the others."""
    run_dir = tmp_path / "run"
    launcher = start(run_dir, "trainer.steps=1000", "launch.restarts=0")
    wait_for_steps(launcher, run_dir, 1)
    everyone = wait_for_engine(launcher, run_dir, "VLLM::Worker")
    (worker,) = titled(everyone, "VLLM::Worker")
    worker.kill()
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1, output
    assert "g0 ended with code 1" in output or "trainer ended with code 1" in output
    assert_gone(everyone, run_dir)
