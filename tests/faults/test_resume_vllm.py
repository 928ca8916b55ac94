"""A run with a real vLLM on CPU that is killed and goes on: what the audit says of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inflight.metrics import SWAPS_FILE, read_lines
from inflight.rollout.restore import newest_version
from inflight.rollout.stream import Reader

pytestmark = [pytest.mark.faults, pytest.mark.vllm]

STEPS = 7


def test_engines_go_on_with_the_checkpoints_weights_and_its_number(make_run):
    """The trainer is killed between checkpoints: steps are undone, their tags leave the record, the rest is true."""
    run = make_run(f"trainer.steps={STEPS}", "trainer.checkpoint_every=3", "rollout.max_tokens=48",
                   "publish.join_timeout_s=240", "bus.dead_after_s=30", vllm=True).start()  # fmt: skip
    run.until(lambda: run.steps() >= 4)
    assert run.kill("trainer")
    assert run.wait() == 1, run.logs()
    begun = run.saved().step
    assert begun == 3
    run.resume()
    assert run.wait() == 0, run.logs()
    assert f"going on from step {begun}" in run.output
    run.account()
    assert run.trained() == list(range(2 * STEPS))
    groups = list(Reader(run.folder / "rollouts" / "rollouts.msgpack"))
    assert sorted(group.group_id for group in groups) == sorted(f"q{index}" for index in range(2 * STEPS))
    assert max(map(newest_version, groups)) <= STEPS
    swaps = [line["version"] for line in read_lines(run.folder / SWAPS_FILE) if line["event"] == "committed"]
    assert len(set(swaps)) == len(swaps), "no version is told twice"
    audit = subprocess.run([sys.executable, "-m", "inflight.cli", "audit", str(run.folder)],
                           capture_output=True, text=True, check=False, timeout=300)  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
