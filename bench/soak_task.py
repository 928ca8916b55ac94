"""A task of which a share of the items is broken, each in one of the ways that real tasks and rewards break."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from dataclasses import dataclass

from inflight.tasks.addition import Addition
from inflight.tasks.base import Item

FAULTS = (
    "item raises",
    "item is None",
    "item hangs",
    "prompt is too long",
    "prompt is a lone surrogate",
    "score raises",
    "score is None",
    "score is not finite",
    "score sleeps",
    "score waits",
    "score holds the GIL",
    "score exits",
    "score takes memory",
)
HUNG_S = 3600.0


def fault_of(seed: int, index: int, share: float) -> str | None:
    """What is wrong with the index-th question; None for most."""
    draw = random.Random(f"{seed}:{index}")
    return draw.choice(FAULTS) if draw.random() < share else None


@dataclass(frozen=True)
class Broken:
    """Addition, with `share` of the questions broken."""

    seed: int
    share: float = 0.05
    memory_gib: int = 30

    def item(self, index: int) -> Item | None:
        """The index-th question, or whatever a broken task gives in its place."""
        fault = fault_of(self.seed, index, self.share)
        if fault == "item raises":
            raise ValueError(f"question {index} is broken")
        if fault == "item is None":
            return None
        if fault == "item hangs":
            time.sleep(HUNG_S)
        item = Addition(self.seed).item(index)
        if fault == "prompt is too long":
            return Item(key=item.key, prompt=item.prompt * 2000, answer=item.answer)
        if fault == "prompt is a lone surrogate":
            return Item(key=item.key, prompt=item.prompt + "\ud835", answer=item.answer)
        return Item(key=item.key, prompt=item.prompt, answer=f"{item.answer}|{fault or ''}")

    async def score(self, item: Item, completion: str) -> float | None:
        """The score of addition, or what a broken reward does."""
        answer, _, fault = item.answer.partition("|")
        if fault == "score raises":
            raise KeyError(item.key)
        if fault == "score is None":
            return None
        if fault == "score is not finite":
            return float("nan")
        if fault == "score sleeps":
            time.sleep(HUNG_S)  # noqa: ASYNC251 - that is the fault
        if fault == "score waits":
            await asyncio.sleep(HUNG_S)
        if fault == "score holds the GIL":
            re.match(r"(a+)+$", "a" * 40 + "!")
        if fault == "score exits":
            os._exit(139)
        if fault == "score takes memory":
            return float(len(bytearray(self.memory_gib << 30)))
        return await Addition(self.seed).score(Item(key=item.key, prompt=item.prompt, answer=answer), completion)
