"""What a score that fails does: `rollout.on_reward_failure`."""

from __future__ import annotations

import dataclasses

import pytest
from openai_server import choice
from rollout_samples import make_config
from test_actor import Moody, play, quick  # noqa: F401 - fixtures

from inflight.actor import grading
from inflight.config import AdvantageConfig, ConfigError, ObjectiveConfig
from inflight.tasks.addition import Addition


@pytest.mark.parametrize(
    ("text", "reason"),
    [("1", "reward timeout"), ("2", "reward error: ZeroDivisionError"), ("3", "reward error: not finite")],
)
def test_it_counts_as_zero_and_the_sample_has_the_reason(play, text, reason, caplog):  # noqa: F811
    async def scene(room):
        rollouts = [rollout for gated in await room.take(2) for rollout in gated.group.rollouts]
        assert sorted((rollout.reward, rollout.unscored) for rollout in rollouts) == [(0.0, reason)] + [(1.0, "")] * 3
        assert room.buffer.counts().failed == {}

    task = Moody(seed=0)
    play(scene, task=task, answers=[choice(text)], concurrency=1, reward_timeout_s=1.0, on_reward_failure="zero")
    (said,) = [record.getMessage() for record in caplog.records if "is not scored" in record.getMessage()]
    assert said.endswith(f"is not scored and counts as 0: {reason} (logged once per reason)")


class Recovering(Addition):
    """A judge that is down for a while."""

    calls = 0

    async def score(self, item, completion):
        type(self).calls += 1
        if self.calls <= 3:
            raise ConnectionError("down")
        return 1.0


def test_it_is_tried_again(play, monkeypatch):  # noqa: F811
    monkeypatch.setattr(grading, "AGAIN_AFTER_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(Recovering, "calls", 0)

    async def scene(room):
        batch = await room.take(1)
        assert [rollout.reward for rollout in batch[0].group.rollouts] == [1.0, 1.0]
        assert batch[0].group.group_id == "q0"
        assert room.buffer.counts().failed == {}

    play(scene, task=Recovering(seed=0), concurrency=1, on_reward_failure="retry")


def test_it_is_given_up_after_the_last_try(play, monkeypatch):  # noqa: F811
    monkeypatch.setattr(grading, "AGAIN_AFTER_S", (0.01, 0.01))
    asked = []

    class Broken(Addition):
        async def score(self, item, completion):
            asked.append(completion)
            if completion == "2":
                raise ZeroDivisionError
            return 1.0

    async def scene(room):
        await room.failed("reward error: ZeroDivisionError")
        assert asked.count("2") == 3
        await room.take(2)

    play(scene, task=Broken(seed=0), answers=[choice("2")], concurrency=1, on_reward_failure="retry")


@pytest.mark.parametrize("name", ["distillation", "process"])
def test_zero_is_no_teachers_and_no_steps_reward(tmp_path, name):
    config = make_config(tmp_path, on_reward_failure="zero")
    trainer = dataclasses.replace(config.trainer, advantage=AdvantageConfig(name))
    with pytest.raises(ConfigError, match=rf"on_reward_failure='zero' .* trainer\.advantage\.name={name}"):
        dataclasses.replace(config, trainer=trainer)


def test_zero_does_not_go_with_a_teachers_reference(tmp_path):
    config = make_config(tmp_path, on_reward_failure="zero")
    trainer = dataclasses.replace(config.trainer, objective=ObjectiveConfig(kl=0.1, kl_reference="teacher"))
    with pytest.raises(ConfigError, match="kl_reference=teacher"):
        dataclasses.replace(config, trainer=trainer)
    with pytest.raises(ConfigError, match=r"on_reward_failure='maybe' is not allowed: drop, zero, retry"):
        make_config(tmp_path, on_reward_failure="maybe")
