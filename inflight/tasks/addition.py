"""Sums in digits only, for the tiny models, whose vocabulary has one token per character."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from inflight.config import require
from inflight.tasks.base import Item


@dataclass(frozen=True)
class Addition:
    """Questions such as `07+15=`, answered by `022`: of fixed width, so that each digit has a fixed place.

    All `10 ** (2 * digits)` questions, except those that are held out, occur once before one repeats.
    """

    seed: int
    digits: int = 1
    """Digits of each summand; the sum has one more."""
    held_out: int = 0
    """How many are kept back for evaluations."""

    def __post_init__(self) -> None:
        require(1 <= self.digits <= 4, "task.options.digits", self.digits, "1 to 4")
        held = self.held_out
        space = 10 ** (2 * self.digits)
        require(0 <= held < space, "task.options.held_out", held, f"0 to {space - 1}, of {space} questions")

    def item(self, index: int) -> Item:
        """Question `index`."""
        return self._item(index % (10 ** (2 * self.digits) - self.held_out))

    def held_out_size(self) -> int:
        """Number of held-out questions."""
        return self.held_out

    def held_out_item(self, index: int) -> Item:
        """Held-out question `index`."""
        return self._item(10 ** (2 * self.digits) - self.held_out + index)

    def _item(self, place: int) -> Item:
        """The question at a place of the seed's order of all questions."""
        space = 10**self.digits
        # An odd multiplier that is not divisible by 5 reaches every residue of a power of ten exactly once.
        offset = int.from_bytes(blake2b(str(self.seed).encode(), digest_size=8).digest())
        left, right = divmod((place * 7919 + offset) % space**2, space)
        prompt = f"{left:0{self.digits}}+{right:0{self.digits}}="
        return Item(key=f"addition:{prompt}", prompt=prompt, answer=f"{left + right:0{self.digits + 1}}")

    async def score(self, item: Item, completion: str) -> float:
        """Share of the answer's digits that are right in their place, 0 to 1; an untrained model guesses some."""
        answer = str(item.answer)
        return sum(got == wanted for got, wanted in zip(completion, answer, strict=False)) / len(answer)
