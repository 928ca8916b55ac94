"""Harm done in turn to runs with real vLLM engines on CPU: bounds, books, no aborted sequence, and the audit."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import psutil
import pytest
from run import free_port

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


def audit(run) -> None:
    """Every tag is right: float32, 1e-4 nats at most."""
    command = [sys.executable, "-m", "inflight.cli", "audit", str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_killed_at_once_then_weights_that_are_no_numbers(make_run):
    """Over TCP with keys. `kill -9` of launcher, trainer and generator leaves no engine behind; a version with NaN is
    sent to nobody and names a parameter; the run goes on from its checkpoint all the same."""
    run = make_run("trainer.steps=8", *PATIENT, "bus.address=127.0.0.1", f"bus.port={free_port()}", vllm=True).start()
    run.until(lambda: run.steps() >= 3, alive=True)
    everyone = run.process("launcher").children(recursive=True)
    assert [p for p in everyone if p.cmdline()[0].startswith("VLLM::")], "the engine is one of them"
    victims = [run.process(name) for name in ("launcher", "trainer", "g0")]
    for victim in victims:
        victim.kill()
    _, left = psutil.wait_procs([p for p in everyone if not _is_tracker(p)], timeout=GONE_S)
    assert left == []
    run.wait()

    assert run.start("resume=true", "trainer.learning_rate=1e30", "trainer.weight_decay=1e30").wait() == 1, run.logs()
    step = run.saved().step
    assert re.search(rf"version {step + 1} is not sent: \S+ holds NaN or Inf", run.output), run.output
    committed = (run.folder / "swaps.jsonl").read_text()
    assert f'"version": {step}' in committed or step == 0
    assert f'"committed", "version": {step + 1}' not in committed

    assert run.resume().wait() == 0, run.logs()
    run.account()
    assert run.trained() == list(range(16))
    assert run.aborted() == 0
    audit(run)


def _is_tracker(process: psutil.Process) -> bool:
    """Python's own, which removes shared memory after the others and ends then."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("resource_tracker" in argument for argument in process.cmdline())
    return True
