"""Any dataset of reasoning-gym (`pip install reasoning-gym`): its questions and its own scoring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inflight.config import ConfigError
from inflight.error_line import one_line
from inflight.tasks.base import Item


@dataclass(frozen=True)
class Gym:
    """Wraps `reasoning_gym.create_dataset(dataset, seed=seed, **options)`.

    Example: `task: {name: gym, options: {dataset: chain_sum, options: {max_digits: 1}, prompt: "{question}\\nA:"}}`.
    """

    seed: int
    dataset: str
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the dataset's own configuration."""
    prompt: str = "Question: {question}\nAnswer:"
    first_line: bool = True
    """Score the completion's first line only: a base model continues with questions of its own."""
    _entries: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise ConfigError("task.name='gym' needs reasoning-gym: pip install reasoning-gym") from None
        try:
            entries = reasoning_gym.create_dataset(self.dataset, seed=self.seed, **self.options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"task.options.dataset={self.dataset!r} can't be made: {one_line(error)}") from None
        if "{question}" not in self.prompt:
            raise ConfigError(f"task.options.prompt={self.prompt!r} is not allowed: it must contain {{question}}")
        object.__setattr__(self, "_entries", entries)

    def item(self, index: int) -> Item:
        """Entry `index` of the dataset."""
        entry = self._entries[index]
        prompt = self.prompt.replace("{question}", entry["question"])
        return Item(key=f"gym:{self.dataset}:{self.seed}:{index}", prompt=prompt, answer=str(entry["answer"]))

    def score(self, item: Item, completion: str) -> float:
        """The dataset's own score, 0 to 1. Its verifiers block, some for long."""
        answer = completion.strip()
        if self.first_line:
            answer = answer.partition("\n")[0].strip()
        entry = self._entries[int(item.key.rpartition(":")[2])]
        return min(1.0, max(0.0, float(self._entries.score_answer(answer, entry))))
