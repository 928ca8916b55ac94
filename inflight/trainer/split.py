"""Splits a step's batch for several updates and several ranks."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from inflight.trainer import budget
from inflight.trainer.batch import Batch, scales
from inflight.trainer.packing import packed_tokens


def mini_batches(batch: Batch, count: int, normalise: str, max_tokens: int) -> list[Batch]:
    """Deals the sequences out at random to `count` updates, as evenly as possible; fewer updates for fewer sequences.

    Each is a batch of its own: the weights of tokens (`Batch.scales`) are computed anew over its sequences.
    """
    order = torch.randperm(len(batch.input_ids))
    found = []
    for rows in order.tensor_split(min(count, len(order))):
        part = batch.rows(rows)
        weights = scales(part.trained_mask.sum(dim=1).tolist(), normalise, max_tokens)
        found.append(dataclasses.replace(part, scales=weights))
    return found


def shares(batch: Batch, size: int, ranks: int, *, mixed: bool = False, tokens: int = 0) -> list[torch.Tensor]:
    """The rows of each micro-batch: of at most `size` sequences and as even as can be, or, where `tokens` is above 0,
    of as many sequences as are computed as at most so many tokens (trainer/budget.py). `mixed`: to be packed."""
    if tokens:
        lengths = batch.lengths().tolist()
        cut = functools.partial(budget.mixed, cost=packed_tokens) if mixed else budget.alike
        return [torch.tensor(part) for part in cut(lengths, tokens, ranks)]
    sequences = batch.input_ids.shape[0]
    count = math.ceil(sequences / (size * ranks)) * ranks
    return batch.cut(math.ceil(sequences / count), mixed=mixed)


def rounds(batch: Batch, size: int, ranks: int, *, mixed: bool = False, tokens: int = 0) -> list[list[Batch]]:
    """Rounds of one micro-batch a rank: those of `shares`, in their order.

    Every rank takes part in every round, because the collectives of a sharded model want all of them: where there is
    nothing left for a rank, it gets a micro-batch again that weighs nothing. With one rank these are the
    batch's micro-batches; `mixed` and `tokens` are theirs.
    """
    parts = [batch.rows(rows) for rows in shares(batch, size, ranks, mixed=mixed, tokens=tokens)]
    again = parts[-1]
    idle = dataclasses.replace(
        again, trained_mask=torch.zeros_like(again.trained_mask), scales=torch.zeros_like(again.scales)
    )
    parts += [idle] * (-len(parts) % ranks)
    return [parts[first : first + ranks] for first in range(0, len(parts), ranks)]
