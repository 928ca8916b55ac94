"""The interface of a task: numbered prompts and a score."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from inflight.prompts import Chat, Prompt
from inflight.types import Turn

__all__ = [
    "Chat",
    "HeldOut",
    "Item",
    "KnowsPlaces",
    "OfFiles",
    "Prompt",
    "Reordered",
    "Score",
    "Task",
    "TurnScorer",
    "columns_of",
    "plain_score",
    "turn_score",
]


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `key` identifies it permanently (the same key is the same question)."""

    key: str
    prompt: Prompt
    answer: Any = None
    """For the task's own use. It is sent to another process: text, bytes, numbers (Decimal, too), dates and times of
    Python's, booleans, None, lists, dicts."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further data of the question by name, for rewards; of the same types as `answer`."""


def columns_of(item: Item) -> dict[str, Any]:
    """What rewards may use of a question, by name: its columns, and `answer` where it has one."""
    answer = {} if item.answer is None else {"answer": item.answer}
    return answer | dict(item.columns)


class Task(Protocol):
    """An endless, deterministic stream of questions and the score of an answer."""

    def item(self, index: int) -> Item:
        """Question `index` of this task for its seed; equal for equal arguments, on every machine."""

    def score(self, item: Item, completion: str) -> float | Awaitable[float]:
        """Reward of a completion, 0 to 1. A plain function may block; one that waits should be asynchronous."""


@runtime_checkable
class HeldOut(Protocol):
    """A task that holds questions out: they are used for evaluation, and never trained on."""

    def held_out_size(self) -> int:
        """Number of held-out questions; 0 for none."""

    def held_out_item(self, index: int) -> Item:
        """Held-out question `index`, in a fixed order. Raises IndexError for an index of the size or above."""


@runtime_checkable
class Reordered(Protocol):
    """A task whose epochs differ in their order. It has `__len__` as well."""

    def item_of_epoch(self, epoch: int, index: int) -> Item:
        """Question `index` of an epoch, both from 0; equal for equal arguments and seed, on every machine."""


@runtime_checkable
class KnowsPlaces(Protocol):
    """A task that knows where its questions come from."""

    def place_of(self, index: int) -> str:
        """Where the index-th question stands, such as a file and a line, for messages. Raises IndexError."""


@runtime_checkable
class OfFiles(Protocol):
    """A task whose questions depend on files that its options name."""

    def contents(self) -> Mapping[str, str]:
        """Dotted name of the option → digest of its file's content. A run resumes only with the same content."""

    def settled(self) -> Mapping[str, Any]:
        """Options that replace the given ones: absolute paths, commits instead of branches."""


@dataclass(frozen=True, slots=True)
class Score:
    """The value of a completion, and optionally of its parts."""

    reward: float
    step_rewards: Sequence[tuple[int, float]] = ()
    """Process rewards, ascending: index of the completion token that ends a step, and that step's reward."""
    teacher_logprobs: Sequence[float] | None = None
    """[T] log-probability of each completion token under a teacher."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What each reward of the run gave, by name (docs/rewards.md); set by the actor."""


@runtime_checkable
class TurnScorer(Protocol):
    """A task that scores tokens: its `score_turn` is called instead of `score`."""

    def score_turn(
        self, item: Item, prompt_ids: Sequence[int], turn: Turn, completion: str
    ) -> Score | Awaitable[Score]:
        """Score of a turn; `completion` is its text without special tokens."""


async def plain_score(task: Task, item: Item, completion: str) -> Any:
    """The result of the task's `score`, which may be asynchronous; unchecked."""
    given = task.score(item, completion)
    return await given if inspect.isawaitable(given) else given


async def turn_score(task: TurnScorer, item: Item, prompt_ids: Sequence[int], turn: Turn, completion: str) -> Any:
    """The result of the task's `score_turn`, which may be asynchronous; unchecked."""
    given = task.score_turn(item, prompt_ids, turn, completion)
    return await given if inspect.isawaitable(given) else given
