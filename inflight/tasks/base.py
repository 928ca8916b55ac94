"""The seam of a task: numbered prompts and an asynchronous score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
