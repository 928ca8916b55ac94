"""Harm done in turn to runs with real vLLM engines on CPU: bounds, books, no aborted sequence, and the audit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
from proxy import Proxy
from run import free_port

from inflight.metrics import SWAPS_FILE, read_lines
from inflight.processes import is_tracker

pytestmark = [pytest.mark.faults, pytest.mark.vllm]

PATIENT = (
    "publish.join_timeout_s=240",
    "bus.dead_after_s=10",
    "publish.max_behind=1000",
    "rollout.max_tokens=48",
    "trainer.learning_rate=1e-4",
)
GONE_S = 10.0
"""What the kernel and the machine may take to end processes."""


def running(run, name: str) -> float:
    """Sequences that a generator's engine works on, as it counts them itself."""
    with urllib.request.urlopen(f"{run.routed()[name].url}/metrics", timeout=20) as answer:
        (line,) = re.findall(r"^vllm:num_requests_running.* (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(line)


def incarnations(run) -> dict[str, str]:
    """Which start of each generator may be asked."""
    return {name: route.incarnation for name, route in run.routed().items()}


def go_on(run, steps: int = 2) -> None:
    """Lets so many steps be done from now on."""
    at = run.steps()
    run.until(lambda: run.steps() >= at + steps, alive=True)


def audit(run) -> None:
    """Every tag is right: float32, 1e-4 nats at most."""
    command = [sys.executable, "-m", "inflight.cli", "audit", str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_killed_cut_off_and_stopped_in_turn(make_run):
    """Of two generators g1 is killed while it decodes, and cut off from the trainer when it is back; then the trainer
    is stopped for a while, and the actor is killed. No engine that lives gives up a sequence for it."""
    run = make_run("trainer.steps=100000", "generator.count=2", *PATIENT, vllm=True).start()
    both = lambda: set(run.routed()) == {"g0", "g1"}  # noqa: E731
    run.until(lambda: run.steps() >= 2 and both(), alive=True)

    run.until(lambda: running(run, "g1") > 0, alive=True)
    before = incarnations(run)
    assert run.kill("g1")
    bus = (run.folder / "bus").resolve()
    os.rename(bus / "weights", bus / "w")  # new connections go through the proxy from now on
    with contextlib.closing(Proxy(f"ipc://{bus}/weights", f"ipc://{bus}/w")) as between:
        run.until(lambda: set(run.routed()) == {"g0"}, alive=True)
        go_on(run)
        run.until(both, alive=True)
        now = incarnations(run)
        assert (now["g0"] == before["g0"], now["g1"] == before["g1"]) == (True, False)

        between.cut.set()
        run.until(lambda: set(run.routed()) == {"g0"}, alive=True)
        go_on(run)
        between.cut.clear()
        run.until(both, alive=True)

        assert run.kill("trainer", signal.SIGSTOP)
        time.sleep(5)
        assert run.kill("trainer", signal.SIGCONT)
        go_on(run)
        run.until(both, alive=True)

        assert run.kill("a0")
        go_on(run, 4)
        assert incarnations(run) == now, "neither was started again for it"
        assert run.kill("launcher", signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert "g1 was ended by SIGKILL; it is restarted" in run.output
    assert "a0 was ended by SIGKILL; it is restarted" in run.output

    done = run.saved().step
    assert run.start("resume=true", f"trainer.steps={done + 3}", "generator.count=1").wait() == 0, run.logs()
    books = run.account()
    assert (run.aborted(), books.failed.get("aborted", 0)) == (0, 0)
    assert len(run.trained()) == 2 * (done + 3)
    written = run.written()
    skipped = sorted(set(range(max(written) + 1)) - set(written))
    assert not skipped, f"{skipped} skipped, though the gate may have dropped what grew old: {books}\n{run.logs()}"
    assert books.failed.get("actor lost", 0) > 0
    audit(run)


def test_all_killed_at_once_then_weights_that_are_no_numbers(make_run):
    """Over TCP with keys. `kill -9` of launcher, trainer and generator orphans no engine; a version with NaN is
    not sent and names a parameter; the run resumes from its checkpoint all the same."""
    run = make_run("trainer.steps=8", *PATIENT, "bus.address=127.0.0.1", f"bus.port={free_port()}", vllm=True).start()
    run.until(lambda: run.steps() >= 3, alive=True)
    everyone = run.process("launcher").children(recursive=True)
    assert [p for p in everyone if p.cmdline()[0].startswith("VLLM::")], "the engine is one of them"
    victims = [run.process(name) for name in ("launcher", "trainer", "g0")]
    for victim in victims:
        victim.kill()
    _, left = psutil.wait_procs([p for p in everyone if not is_tracker(p)], timeout=GONE_S)
    assert left == []
    run.wait()

    assert run.start("resume=true", "trainer.learning_rate=1e30", "trainer.weight_decay=1e30").wait() == 1, run.logs()
    step = run.saved().step
    assert re.search(rf"version {step + 1} is rejected: \S+ holds NaN or Inf", run.output), run.output
    events = {(line["event"], line["version"]) for line in read_lines(run.folder / SWAPS_FILE)}
    assert ("failed", step + 1) in events
    assert ("committed", step + 1) not in events

    # A resumed run keeps what was set for the start before.
    sane = ("trainer.learning_rate=1e-3", "trainer.weight_decay=0")
    assert run.start("resume=true", *sane).wait() == 0, run.logs()
    run.account()
    assert run.trained() == list(range(16))
    assert run.aborted() == 0
    audit(run)
