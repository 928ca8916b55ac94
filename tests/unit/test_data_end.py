"""A task that ends: from the actor's question to the trainer's last batch, with nothing counted as failed."""

from __future__ import annotations

import dataclasses

import pytest
from openai_server import choice
from rollout_samples import make_config, make_group
from test_actor import play, quick  # noqa: F401 - fixtures

from inflight.groups import group_id
from inflight.messages import GroupDone, GroupFailed
from inflight.rollout.buffer import DataEnded
from inflight.rollout.ledger import Ledger
from inflight.tasks.addition import Addition

QUESTIONS = 5


class Short(Addition):
    """Five questions."""

    def item(self, index):
        if index >= QUESTIONS:
            raise self.error
        return super().item(index)


class Exhausted(Short):
    error = StopIteration


class Beyond(Short):
    error = IndexError("list index out of range")


@pytest.mark.parametrize("kind", [Beyond, Exhausted])
def test_every_question_is_trained_on_and_then_the_data_ends(play, kind):  # noqa: F811
    async def scene(room):
        names = [gated.group.group_id for _ in range(2) for gated in await room.take(2)]
        with pytest.raises(DataEnded, match="all 5 questions were asked, and 1 groups are left, fewer than the 2"):
            await room.take(2)
        assert sorted(names) < [group_id(index) for index in range(QUESTIONS)]
        counts = room.buffer.counts()
        counts.check()
        assert (counts.failed, counts.in_flight, counts.buffered) == ({}, 0, 1)
        assert not room.running.done(), "the actor lives"
        assert await room.finish() == "enough"

    play(scene, task=kind(seed=0), concurrency=4, max_lag=3, default=choice)


def test_questions_that_an_actor_leaves_are_requeued_before_the_data_ends(tmp_path):
    ledger = Ledger(make_config(tmp_path, concurrency=8, max_lag=3))
    ledger.hello("a0", "0" * 16)
    assert ledger.grants() == {"a0": list(range(8))}
    end = GroupFailed(group_id="q6", reason="data ended", again=False, questions=3)
    for _ in range(2):
        ledger.settle("a0", end)
        counts = ledger.counts()
        counts.check()
        assert (counts.granted, counts.in_flight, counts.failed) == (3, 3, {})
    ledger.settle("a0", GroupDone(group=make_group("q0")))
    ledger.leave("a0", "actor stopped")
    assert ledger.data_ended is None
    ledger.hello("a1", "1" * 16)
    assert ledger.grants() == {"a1": [1, 2]}
    ledger.settle("a1", GroupDone(group=make_group("q1")))
    assert ledger.data_ended is None
    ledger.settle("a1", GroupDone(group=make_group("q2")))
    assert ledger.data_ended == 3
    assert ledger.grants() == {}
    ledger.counts().check()
    assert ledger.counts().lost == ["2 were re-queued after an interruption"]
    gave_up = dataclasses.replace(ledger.counts(), failed={"actor stopped": 2, "prompt too long": 1})
    assert gave_up.lost[1:] == ["1 of 3 groups failed (prompt too long: 1)"]


def test_a_run_resumed_after_the_end_finds_it_again(tmp_path):
    config = make_config(tmp_path)
    ledger = Ledger(config)
    ledger.hello("a0", "0" * 16)
    ledger.grants()
    for name in ("q0", "q1"):
        ledger.settle("a0", GroupDone(group=make_group(name)))
    usable = []
    ledger.judge(usable, 2, 0, config.gate)
    ledger.train(usable)
    again = Ledger(config, ledger.books())
    again.hello("a0", "1" * 16)
    assert again.data_ended is None
    assert again.grants() == {"a0": [2, 3]}
    again.settle("a0", GroupFailed(group_id="q3", reason="data ended", again=False, questions=2))
    assert again.data_ended == 2
    again.counts().check()


def test_an_end_after_lost_groups_says_how_many_and_why(play):  # noqa: F811
    class Failing(Beyond):
        async def score(self, item, completion):
            raise KeyError("no such column")

    async def scene(room):
        lost = r"5 of 5 groups failed \(reward .*KeyError: 5\), and 0 groups are left, fewer than the 2 of a step"
        with pytest.raises(DataEnded, match=f"all 5 questions were asked, {lost}"):
            await room.take(2)
        assert await room.finish() == "enough"

    play(scene, task=Failing(seed=0), concurrency=4, max_lag=3, default=choice)
