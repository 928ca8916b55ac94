"""Arithmetic progressions: the first terms are given, the model continues them.

Completions are long and cheap to check, and the reward is dense: every right term in order adds its share, so that even
a small model starts above zero and no sample is all or nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise, takewhile

from inflight.config.checks import require, require_one_of
from inflight.tasks.base import Item

STYLES = {
    "python": ">>> list(range({start}, 1000, {step}))\n[{shown},",
    "say": "Count by {step}: {shown},",
    "plain": "{shown},",
    "shots": "5, 6, 7, 8, 9, 10, 11, 12, 13\n10, 20, 30, 40, 50, 60, 70, 80, 90\n{shown},",
    "chat": "<|im_start|>user\nCount by {step} from {start}<|im_end|>\n<|im_start|>assistant\n{shown},",
}
"""Prompts by style; each ends inside the sequence, so that the model continues with ` ` and the next term."""
REWARDS = ("steps", "prefix")

_INTEGER = re.compile(r"\d{1,9}")
"""At most nine digits, so that a degenerate completion can't cost the conversion of a huge number."""


@dataclass(frozen=True)
class Progression:
    """Questions `start, start + step, …` with `start` in 1..max_start and `step` in 1..max_step, in a seeded order.

    No question repeats before all `max_start * max_step`, except those that are held out, have occurred.

    Example: with `style="plain"` an item may ask `12, 15, 18, 21, 24, 27,` and expect `30, 33, …`.
    """

    seed: int
    terms: int = 14
    """Expected terms; right terms after them add nothing."""
    shown: int = 6
    """Terms in the prompt."""
    max_start: int = 60
    max_step: int = 4
    style: str = "python"
    reward: str = "steps"
    """`steps`: a term is right if it is the preceding term of the completion plus the step. `prefix`: terms count up to
    the first wrong one."""
    held_out: int = 0
    """Number of questions that are kept for evaluations."""
    _order: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("terms", "max_start", "max_step"):
            require(getattr(self, name) >= 1, f"task.options.{name}", getattr(self, name), "1 or more")
        require(self.shown >= 2, "task.options.shown", self.shown, "2 or more (one term shows no step)")
        require_one_of(self, "task.options", "style", STYLES)
        held = self.held_out
        space = self.max_start * self.max_step
        require(0 <= held < space, "task.options.held_out", held, f"0 to {space - 1}, of {space} questions")
        require_one_of(self, "task.options", "reward", REWARDS)

        def rank(number: int) -> bytes:  # a hash gives the same order on every machine and Python version
            return blake2b(f"{self.seed}:{number}".encode(), digest_size=16).digest()

        object.__setattr__(self, "_order", sorted(range(self.max_start * self.max_step), key=rank))

    def item(self, index: int) -> Item:
        """Question `index`; `answer` has all expected terms."""
        return self._item(index % (len(self._order) - self.held_out))

    def held_out_size(self) -> int:
        """Number of held-out questions."""
        return self.held_out

    def held_out_item(self, index: int) -> Item:
        """Held-out question `index`."""
        return self._item(len(self._order) - self.held_out + index)

    def _item(self, place: int) -> Item:
        number = self._order[place]
        start = number // self.max_step + 1
        step = number % self.max_step + 1
        shown = ", ".join(str(start + step * n) for n in range(self.shown))
        wanted = ", ".join(str(start + step * n) for n in range(self.shown, self.shown + self.terms))
        prompt = STYLES[self.style].format(start=start, step=step, shown=shown)
        return Item(key=f"progression:{start}:{step}", prompt=prompt, answer=wanted)

    async def score(self, item: Item, completion: str) -> float:
        """Share of the expected terms that the completion's first line has right, 0 to 1."""
        given = [int(digits) for digits in _INTEGER.findall(completion.partition("\n")[0])[: self.terms]]
        wanted = [int(digits) for digits in item.answer.split(", ")]
        if self.reward == "prefix":
            pairs = zip(given, wanted, strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / self.terms
        _, _, step = item.key.split(":")
        before = [wanted[0] - int(step), *given]
        return sum(now - then == int(step) for then, now in pairwise(before)) / self.terms
