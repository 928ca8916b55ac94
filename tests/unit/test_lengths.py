"""Whether a run loses the long answers shows in its metrics."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from openai_server import chunk
from rollout_samples import make_config, make_group, make_rollout
from test_actor import play, quick  # noqa: F401 - fixtures

from inflight.messages import GroupDone, GroupFailed
from inflight.rollout.gate import gate_group
from inflight.rollout.ledger import Ledger
from inflight.trainer.advantage import group_mean
from inflight.trainer.batch import collate
from inflight.trainer.lines import rewards_and_lags


def test_lost_samples_count_as_far_as_they_came(tmp_path):
    ledger = Ledger(make_config(tmp_path))
    assert ledger.lengths.values() == {"length_asked": 0.0, "length_finished": 0.0}
    ledger.hello("a0", "0" * 16)
    ledger.grants()
    for _ in range(2):  # the second one changes nothing
        ledger.settle("a0", GroupDone(group=make_group("q0", length=6)))
        ledger.settle("a0", GroupFailed(group_id="q1", reason="reward timeout", again=False, lengths=[30, 10]))
    assert ledger.lengths.values() == {"length_asked": 13.0, "length_finished": 6.0}


def test_the_actor_tells_how_far_a_lost_group_had_come(play):  # noqa: F811
    rooms = []

    async def refused():
        await rooms[0].until(lambda: rooms[0].sampler.answers.tokens == 3)
        return 400

    async def scene(room):
        rooms.append(room)
        await room.failed("http 400")
        assert room.buffer.lengths()["length_asked"] == pytest.approx(3 / 2)

    slow = [chunk("012"), lambda: asyncio.sleep(3600)]
    play(
        scene,
        answers=[slow, refused],
        default=lambda: asyncio.sleep(3600),
        concurrency=1,
        max_lag=0,
        step=1,
    )


def test_the_share_of_first_tokens_that_were_too_old(tmp_path):
    config = make_config(tmp_path, max_token_lag=2)
    old, new = make_group("q0", spans=[(0, 0), (3, 5)]), make_group("q1", spans=[(0, 5)], length=10)
    groups = [gate_group(group, 5, config.gate) for group in (old, old, old, new)]
    batch = collate(groups, advantage=group_mean, normalise="token", max_tokens=64)
    told = rewards_and_lags(groups, [0.5], batch)
    assert (told["first_tokens_masked"], told["length_trained"]) == (0.75, 7.0)
    assert told["left_out"] == []


def test_rollouts_that_the_gate_left_out_are_named(tmp_path):
    config = make_config(tmp_path, max_token_lag=2)
    fresh, stale = make_group("q0", spans=[(0, 5)], size=3), make_rollout("q0", 2, spans=[(0, 0)])
    group = gate_group(msgspec.structs.replace(fresh, rollouts=[*fresh.rollouts[:2], stale]), 5, config.gate)
    batch = collate([group], advantage=group_mean, normalise="token", max_tokens=64)
    assert rewards_and_lags([group], [0.5], batch)["left_out"] == ["q0/2"]
