"""Rewards that compare a group's completions, from real requests to the buffer, and in an evaluation."""

from __future__ import annotations

import asyncio

import pytest
from openai_server import Server, Tokens, choice
from reward_samples import place_of
from test_actor import play, quick  # noqa: F401 - fixtures
from test_evaluation import Arena

from inflight.actor import grading
from inflight.config import RewardConfig

RANK = RewardConfig("reward_samples:rank")
RANKED = place_of("sum(len(each) > len(text)")
ANSWERS = ("0", "07", "1234", "07")


def by_text(group):
    return [(Tokens().decode(each.turn.token_ids), each.reward, each.unscored) for each in group.rollouts]


def test_each_rollout_has_the_value_that_it_got_beside_the_others(play):  # noqa: F811
    async def scene(room):
        (gated,) = await room.take(1)
        found = by_text(gated.group)
        assert sorted(found) == [("0", 1.0, ""), ("07", 1 / 3, ""), ("07", 1 / 3, ""), ("1234", 0.0, "")]
        assert all(each.rewards == {"rank": each.reward} for each in gated.group.rollouts)
        assert all(each.score_s > 0 for each in gated.group.rollouts)
        assert room.actor.status()["scores"] >= 4

    answers = [choice(text) for text in ANSWERS]
    play(scene, answers=answers, concurrency=1, size=4, rewards=[RANK])


@pytest.mark.parametrize("policy", ["drop", "zero", "retry"])
def test_a_comparison_that_fails_is_a_failed_score_of_all(play, monkeypatch, policy):  # noqa: F811
    monkeypatch.setattr(grading, "AGAIN_AFTER_S", (0.01,))
    monkeypatch.setattr("reward_samples.failures", 1)
    reason = f"reward moody error: ConnectionError at {place_of('raise ConnectionError')}"

    async def scene(room):
        if policy == "drop":
            await room.failed(reason)
            return
        (gated,) = await room.take(1)
        assert gated.group.group_id == "q0"
        unscored = reason if policy == "zero" else ""
        assert [(each.reward, each.unscored) for each in gated.group.rollouts] == [(float(not unscored), unscored)] * 2

    play(scene, concurrency=1, on_reward_failure=policy, rewards=[RewardConfig("reward_samples:moody")])


def test_with_zero_one_without_a_reward_costs_itself(play):  # noqa: F811
    async def scene(room):
        (gated,) = await room.take(1)
        assert sorted(by_text(gated.group)) == [(" ", 0.0, "reward error: none applies"), ("07", 0.0, "")]

    play(scene, answers=[choice(" ")], concurrency=1, on_reward_failure="zero", rewards=[RANK])


def test_the_samples_of_a_held_out_question_are_compared(tmp_path):
    async def scene():
        async with Server(lambda: choice("07", 4)) as server:
            server.answers = [choice("0", 4), choice("07", 4), 500, 500, 500, choice("07", 4)]
            arena = Arena(tmp_path, server, concurrency=1, rewards=[RewardConfig("reward_samples:company"), RANK])
            return await arena.ask()

    answered = asyncio.run(scene())
    assert [(each.question, each.sample) for each in answered] == [(q, s) for q in range(3) for s in range(2)]
    assert [each.reward for each in answered[:2]] == [3.0, 2.0]
    assert [each.failed for each in answered[2:4]] == ["http 500", f"reward rank error: ZeroDivisionError at {RANKED}"]
    assert [each.reward for each in answered[4:]] == [2.0, 2.0]
