"""A step's batch, cut for several ranks."""

from __future__ import annotations

import dataclasses
import math

import torch

from inflight.trainer.batch import Batch


def rounds(batch: Batch, size: int, ranks: int, *, mixed: bool = False) -> list[list[Batch]]:
    """Rounds of one micro-batch a rank, of at most `size` sequences each and as even as can be.

    Every rank takes part in every round, because the collectives of a sharded model want all of them: where there is
    nothing left for a rank, it gets a micro-batch again that weighs nothing. With one rank these are the
    batch's micro-batches; `mixed` is theirs.
    """
    sequences = batch.input_ids.shape[0]
    count = math.ceil(sequences / (size * ranks)) * ranks
    parts = batch.micro_batches(math.ceil(sequences / count), mixed=mixed)
    again = parts[-1]
    idle = dataclasses.replace(
        again, trained_mask=torch.zeros_like(again.trained_mask), scales=torch.zeros_like(again.scales)
    )
    parts += [idle] * (-len(parts) % ranks)
    return [parts[first : first + ranks] for first in range(0, len(parts), ranks)]
