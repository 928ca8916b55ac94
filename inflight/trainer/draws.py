"""The sampled tokens of a batch, with the data on them other than logits, a few at a time."""

from __future__ import annotations

import torch

from inflight.config import Sampling
from inflight.sampling import Recorded
from inflight.trainer.batch import Batch


class Draws:
    """The N sampled tokens of a batch, in the order of `completion_mask.nonzero()`: sequence by sequence."""

    def __init__(self, batch: Batch, sampling: Sampling) -> None:
        """`sampling` tells whether the preceding tokens are needed, as they are for penalties."""
        self._batch = batch
        self.sequence, self.at = batch.completion_mask.nonzero(as_tuple=True)
        """[N] int64 each: the row and the column of each draw in the batch."""
        self._before = _Before(batch) if sampling.penalises else None

    def __len__(self) -> int:
        return len(self.sequence)

    def recorded(self, draws: slice) -> Recorded:
        """The recorded data of these draws; `draws` is a slice of 0 to N."""
        sequence = self.sequence[draws]
        at = self.at[draws]
        chosen = self._batch.input_ids[sequence, at]
        kept = None if self._batch.kept is None else self._batch.kept[sequence, at]
        if self._before is None:
            return Recorded(chosen, kept)
        return Recorded(chosen, kept, *self._before.of(sequence, at))


class _Before:
    """Which tokens precede a draw, and how often. Per draw that is a row over the U different tokens of its sequence,
    so it is computed for a few draws at a time: all rows together would be as large as tokens x vocabulary."""

    def __init__(self, batch: Batch) -> None:
        ids = batch.input_ids
        drawn = batch.completion_mask
        self._drawn = drawn
        self._different, self._number = _different(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        prompt = ~drawn & (positions < batch.lengths()[:, None])
        self._in_prompt = torch.zeros_like(self._different, dtype=torch.bool)
        sequence, at = prompt.nonzero(as_tuple=True)
        self._in_prompt[sequence, self._number[sequence, at]] = True

    def of(self, sequence: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`seen`, `in_prompt` and `drawn_before` of Recorded, [n, U] each, of consecutive draws."""
        numbers = torch.arange(self._different.shape[1], device=at.device)
        draws = (self._number[sequence, at][:, None] == numbers).int()
        before = draws.cumsum(dim=0, dtype=torch.int32) - draws
        before = before - before[torch.searchsorted(sequence, sequence)]  # without the draws of other sequences
        first = self._number[sequence[0], : at[0]][self._drawn[sequence[0], : at[0]]]
        earlier = torch.bincount(first, minlength=len(numbers)).int()  # only the first sequence can have such draws
        before += earlier * (sequence == sequence[0])[:, None]
        return self._different[sequence], self._in_prompt[sequence], before


def _different(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different tokens of each row of [B, L], as [B, U] ascending and padded with 0, and the index of each token
    in it."""
    ascending, order = ids.sort(dim=1)
    another = ascending.diff(dim=1, prepend=ascending[:, :1]) != 0
    number = torch.zeros_like(ids).scatter(1, order, another.cumsum(dim=1))
    return ids.new_zeros(ids.shape[0], int(number.max()) + 1).scatter(1, number, ids), number
