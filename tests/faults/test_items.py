"""Items that misbehave cost themselves alone, in whole runs of real processes, also one that ends an actor."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from wild import REASONS

pytestmark = pytest.mark.faults

SOUND = 24
TASK = ("task.name=wild:Wild", "rollout.reward_timeout_s=2", "rollout.reward_memory_mib=2048")


def test_each_item_that_misbehaves_is_counted_by_its_reason_and_ends_no_process(make_run, monkeypatch):
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    run = make_run(*TASK, f"trainer.steps={SOUND // 2}", "gate.max_token_lag=1000", "launch.restarts=0").start()
    assert run.wait() == 0, run.logs()
    books = run.account()
    assert Counter(books.failed) == Counter(REASONS.values())
    assert run.trained() == [index for index in range(SOUND + len(REASONS)) if index not in REASONS]
