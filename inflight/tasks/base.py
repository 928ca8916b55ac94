"""The seam of a task: numbered prompts and an asynchronous score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from inflight.types import Turn


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `key` names it for good (the same key is the same question)."""

    key: str
    prompt: str
    answer: str


class Task(Protocol):
    """An endless, deterministic stream of questions and the score of an answer."""

    def item(self, index: int) -> Item:
        """The index-th question of this task for its seed; equal for equal arguments, on every machine."""

    async def score(self, item: Item, completion: str) -> float:
        """Reward of a completion, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a completion is worth, and what of it."""

    reward: float
    step_rewards: Sequence[tuple[int, float]] = ()
    """Process rewards, ascending: index of the completion token that ends a step, and what the step has earned."""
    teacher_logprobs: Sequence[float] | None = None
    """[T] log-probability of each completion token under a teacher."""


@runtime_checkable
class TurnScorer(Protocol):
    """A task that looks at tokens: where it has `score_turn`, that is awaited in place of `score`."""

    async def score_turn(self, item: Item, prompt_ids: Sequence[int], turn: Turn, completion: str) -> Score:
        """Score of a turn; `completion` is its text without special tokens."""
