"""A run with a real vLLM on CPU that is killed and resumed, and its audit."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from inflight.metrics import SWAPS_FILE, read_lines
from inflight.rollout.restore import newest_version
from inflight.rollout.stream import Reader

pytestmark = [pytest.mark.faults, pytest.mark.vllm]

STEPS = 6
GROUPS = 8
"""A step of the resumed run: more than can wait from before, so that engines are asked under its first version."""


def test_engines_resume_with_the_checkpoints_weights_and_its_version(make_run):
    """The trainer is killed between checkpoints: steps are undone, their tags leave the record, the rest is true."""
    run = make_run(
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_every=3",
        "rollout.max_tokens=48",
        "publish.join_timeout_s=240",
        "bus.dead_after_s=30",
        vllm=True,
    ).start()
    run.until(lambda: run.steps() >= 4)
    assert run.kill("trainer")
    assert run.wait() == 1, run.logs()
    begun = run.saved().step
    assert begun == 3
    since = time.time()
    assert run.start("resume=true", f"trainer.groups_per_step={GROUPS}").wait() == 0, run.logs()
    assert f"resuming from step {begun}" in run.output
    run.account()
    trained = 2 * begun + GROUPS * (STEPS - begun)
    assert run.trained() == run.written() == list(range(trained))
    groups = list(Reader(run.folder / "rollouts" / "rollouts.msgpack"))
    assert max(map(newest_version, groups)) <= STEPS
    new = [rollout.turn for group in groups for rollout in group.rollouts if rollout.started > since]
    assert begun in {turn.token_versions[0].version for turn in new}, "the checkpoint's version has answered"
    swaps = [line["version"] for line in read_lines(run.folder / SWAPS_FILE) if line["event"] == "committed"]
    assert len(set(swaps)) == len(swaps), "no version is reported twice"
    audit = subprocess.run(
        [sys.executable, "-m", "inflight.cli", "audit", str(run.folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
