"""The scores of a group: what is found of each completion alone, then what is found of all of them together.

A failure is handled by `rollout.on_reward_failure`: the group is lost, the score is 0, or the call is repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from inflight.actor.called import GroupLost
from inflight.actor.calls import Question
from inflight.actor.foreign import Foreign, ScoredAlone
from inflight.actor.scoring import Completion
from inflight.tasks.base import Score

T = TypeVar("T")

AGAIN_AFTER_S = (2.0, 8.0, 32.0)
"""Pauses in seconds before a failed call is repeated: a judge that is down for half a minute costs no question."""


@dataclass(frozen=True)
class Graded:
    """A completion with what was found of it alone."""

    completion: Completion
    alone: ScoredAlone | str
    """Or the reason of a failure that counts as 0."""
    took_s: float


@dataclass(frozen=True)
class Grade:
    """The final score of a completion."""

    score: Score
    unscored: str
    """The reason of a failure that counts as 0; empty: it was scored."""
    took_s: float
    """Seconds that scoring took, failed attempts and pauses included, the wait for other completions not."""


class Grader:
    """Its only state is counters, so that any number of groups may be graded at once in one event loop."""

    def __init__(self, foreign: Foreign, on_failure: str) -> None:
        self._foreign = foreign
        self._on_failure = on_failure
        self.scores = 0
        self.score_s = 0.0
        """Completions that were scored, or could not be, and the seconds that this took."""

    async def alone(self, question: Question, prompt_ids: list[int], completion: Completion) -> Graded:
        """What can be found of a completion before the others are complete. Raises GroupLost."""
        began = time.monotonic()
        try:
            found = await self._tried(lambda: self._foreign.score(question, prompt_ids, completion))
        finally:
            took = time.monotonic() - began
            self.scores += 1
            self.score_s += took
        return Graded(completion, found, took)

    async def together(self, question: Question, group: Sequence[Graded]) -> list[Grade]:
        """The scores of all completions of a question, in their order. Raises GroupLost."""
        began = time.monotonic()
        completions = [each.completion for each in group]
        try:
            found = await self._tried(lambda: self._foreign.compare(question, completions))
        finally:
            took = time.monotonic() - began
            self.score_s += took
        compared: Sequence[dict[str, float] | str] = [found] * len(group) if isinstance(found, str) else found
        return [self._total(question, each, values, took) for each, values in zip(group, compared, strict=True)]

    def _total(self, question: Question, graded: Graded, compared: dict[str, float] | str, took: float) -> Grade:
        took += graded.took_s
        if isinstance(graded.alone, str):
            return Grade(Score(0.0), graded.alone, took)
        if isinstance(compared, str):
            return Grade(Score(0.0), compared, took)
        try:
            return Grade(self._foreign.total(question, graded.alone, compared), "", took)
        except GroupLost as failed:
            if self._on_failure != "zero":
                raise
            return Grade(Score(0.0), failed.reason[:128], took)

    async def _tried(self, call: Callable[[], Awaitable[T]]) -> T | str:
        """The result, or the reason of a failure that counts as 0. Raises GroupLost."""
        pauses = iter(AGAIN_AFTER_S if self._on_failure == "retry" else ())
        while True:
            try:
                return await call()
            except GroupLost as failed:
                if self._on_failure == "zero":
                    return failed.reason[:128]
                pause = next(pauses, None)
                if pause is None:
                    raise
            await asyncio.sleep(pause)
