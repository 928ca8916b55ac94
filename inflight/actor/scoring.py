"""The rewards of a run, added up by weight: each is a call of its own, with its own time limit and its own name.

A reward is called with all completions of a question, or with one (RewardConfig.per).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from inflight.actor import calls
from inflight.actor.called import Caller, GroupLost, Traces, all_of, called
from inflight.actor.calls import MakeRewards, Question
from inflight.actor.crew import Crew
from inflight.actor.worker_process import Bounds
from inflight.config import RewardConfig
from inflight.groups import is_usable
from inflight.tasks.base import Score
from inflight.types import Turn


@dataclass(frozen=True)
class Completion:
    """A sampled completion of a question."""

    turn: Turn
    text: str
    """Without special tokens."""


@dataclass(frozen=True)
class Rewarded:
    """A reward, and which of its crew's rewards it is."""

    config: RewardConfig
    crew: Caller
    which: int


class Rewards:
    """All rewards of a run but the task's own score."""

    def __init__(self, rewards: Sequence[Rewarded], task: RewardConfig | None, limit_s: float) -> None:
        """`task` is the entry for the task's own score, where there is one."""
        self._rewards = rewards
        self.task = task
        self._limit_s = limit_s
        self._traces = Traces()
        every = [each.config for each in rewards] + ([task] if task is not None else [])
        self._weights = {each.known_as: each.weight for each in every}

    @property
    def compares(self) -> bool:
        """Whether one of them is called once for a group."""
        return any(each.config.of_group for each in self._rewards)

    async def values(
        self, question: Question, completions: Sequence[Completion], *, of_group: bool
    ) -> list[dict[str, float]]:
        """For each completion the value of each reward that applies to it, by name: of the rewards that are called
        once for a group, or of the others. Raises GroupLost, or ForeignError."""
        asked = [each for each in self._rewards if each.config.of_group == of_group]
        found: list[dict[str, float]] = [{} for _ in completions]
        given = await all_of([self._values(each, question, completions) for each in asked])
        for each, values in zip(asked, given, strict=True):
            for named, value in zip(found, values, strict=True):
                if value is not None:
                    named[each.config.known_as] = value
        return found

    def sum(self, question: Question, values: dict[str, float], score: Score | None) -> Score:
        """The weighted sum of the values and the task's own score; step rewards and teacher log-probabilities are the
        task's.

        Raises GroupLost when no reward applies, or when the sum is too large to be trained on.
        """
        parts = values if score is None or self.task is None else values | {self.task.known_as: score.reward}
        if not parts:
            raise GroupLost("reward error: none applies", f"{question.key}: each reward gave None")
        total = sum(self._weights[name] * value for name, value in parts.items())
        if not is_usable(total):
            raise GroupLost("reward error: not finite", f"{question.key}: {parts}"[:1000])
        return replace(score or Score(total), reward=total, parts=parts)

    async def _values(
        self, reward: Rewarded, question: Question, completions: Sequence[Completion]
    ) -> list[float | None]:
        name = f"reward {reward.config.known_as}"
        answer = await called(
            reward.crew,
            name,
            question.key,
            lambda call: calls.AskReward(
                call,
                reward.which,
                question,
                completions=[each.text for each in completions],
                completion_ids=[each.turn.token_ids.tolist() for each in completions],
                finish_reasons=[each.turn.finish_reason for each in completions],
            ),
            self._limit_s,
            self._traces,
        )
        assert isinstance(answer, calls.RewardsAre)
        if not all(value is None or is_usable(value) for value in answer.values):
            raise GroupLost(f"{name} error: not finite", f"{question.key}: {answer.values}"[:1000])
        return answer.values


async def rewards_of(
    configs: Sequence[RewardConfig], bounds: Bounds, workers: int, stack: contextlib.AsyncExitStack
) -> Rewards:
    """The rewards, in child processes that end with `stack`: asynchronous ones share some, plain ones have one each.

    Raises NotMade when a reward can't be made.
    """
    task = next((each for each in configs if each.is_task), None)
    make = MakeRewards(rewards=[each for each in configs if not each.is_task], limit_s=bounds.limit_s)
    if not make.rewards:
        return Rewards([], task, bounds.limit_s)
    crew = Crew(make, bounds, workers)
    stack.push_async_callback(crew.close)
    crew.start()
    await crew.made()
    waits = crew.ready.asynchronous
    rewards = [Rewarded(each, crew, which) for which, each in enumerate(make.rewards)]
    if any(waits) and not all(waits):
        waiting = [each for each, asynchronous in zip(make.rewards, waits, strict=True) if asynchronous]
        other = Crew(msgspec.structs.replace(make, rewards=waiting), bounds, workers)
        stack.push_async_callback(other.close)
        other.start()
        await other.made()
        rewards = [
            Rewarded(each.config, other, waiting.index(each.config)) if asynchronous else each
            for each, asynchronous in zip(rewards, waits, strict=True)
        ]
    return Rewards(rewards, task, bounds.limit_s)
