"""Micro-batches by tokens: as many sequences in each as fit into a number of tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

Cost = Callable[[Sequence[int]], int]
"""Lengths of the sequences of a micro-batch → tokens that the model computes for it."""


def padded_tokens(lengths: Sequence[int]) -> int:
    """Of a row a sequence, each as wide as the longest."""
    return len(lengths) * max(lengths)


def alike(lengths: Sequence[int], tokens: int, ranks: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch, of similar lengths, so that little is padded.

    Padding included, a micro-batch is of at most `tokens`; a longer sequence is alone in one. Their number is a
    multiple of `ranks` while there is one with two sequences to divide; the costliest ones come first, so that ranks
    that compute at the same time have about the same work.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    parts = list[list[int]]()
    while order:
        count = max(1, tokens // lengths[order[0]])
        parts.append(order[:count])
        order = order[count:]

    def cost(part: Sequence[int]) -> int:
        return padded_tokens([lengths[index] for index in part])

    while len(parts) % ranks and any(len(part) > 1 for part in parts):
        largest = max((part for part in parts if len(part) > 1), key=cost)
        parts.remove(largest)
        middle = math.ceil(len(largest) / 2)
        parts += [largest[:middle], largest[middle:]]
    return sorted(parts, key=cost, reverse=True)


def mixed(lengths: Sequence[int], tokens: int, ranks: int, cost: Cost) -> list[list[int]]:
    """The same for sequences that are packed: long ones and short ones together, so that `cost` is nearly their sum.

    The fewest micro-batches, a multiple of `ranks`, into which the longest-first rule (Graham 1969, "Bounds on
    multiprocessing timing anomalies") deals the sequences with none above `tokens`.
    """
    fewest = math.ceil(sum(lengths) / tokens / ranks) * ranks
    for count in range(fewest, len(lengths), ranks):
        parts = _dealt(lengths, count)
        if all(cost([lengths[index] for index in part]) <= tokens for part in parts):
            return parts
    return _dealt(lengths, len(lengths))


def _dealt(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Into `count` parts, the longest first, each where the sum is least; the largest part first."""
    parts: list[list[int]] = [[] for _ in range(count)]
    least = [(0, number) for number in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        total, number = heapq.heappop(least)
        parts[number].append(index)
        heapq.heappush(least, (total + lengths[index], number))
    return sorted(parts, key=lambda part: -sum(lengths[index] for index in part))
