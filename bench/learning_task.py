"""A question that a model of 0.6 M random parameters learns in a minute: counting on, digit by digit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from inflight.tasks.base import Item


@dataclass(frozen=True)
class Counting:
    """Asks `7` and wants `8901234…`: every digit is the one before it plus one, modulo ten.

    Long and dense on purpose: answers live through several swaps, and each token earns its own share of the reward.
    """

    seed: int
    length: int = 64
    """Digits that are wanted; right ones beyond earn nothing."""

    def item(self, index: int) -> Item:
        """The index-th question; ten different ones, in a seeded order."""
        digit = (index * 7 + self.seed) % 10
        return Item(key=f"counting:{self.seed}:{index}", prompt=str(digit), answer="")

    async def score(self, item: Item, completion: str) -> float:
        """Share of the wanted digits that follow from the character before them."""
        given = (item.prompt + completion)[: self.length + 1]
        right = sum(a.isdigit() and b.isdigit() and (int(a) + 1) % 10 == int(b) for a, b in pairwise(given))
        return right / self.length
