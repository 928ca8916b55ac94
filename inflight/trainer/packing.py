"""Layout of a micro-batch's sequences in the rows that a model computes: one per row, or several end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The input of a model for B sequences, and where each of them lies in it."""

    input_ids: torch.Tensor
    """[R, W] int64."""
    position_ids: torch.Tensor | None
    """[R, W] int64, starting from 0 at each sequence: transformers derives the mask that separates them from it. None
    if each sequence has a row of its own."""
    row: torch.Tensor
    """[B] int64, the row of each sequence."""
    start: torch.Tensor
    """[B] int64, the column of its first token."""
    attention: dict[str, Any] = field(default_factory=dict)
    """What variable-length attention has to know, under transformers' names (trainer/varlen.py)."""


def padded(ids: torch.Tensor) -> PackedRows:
    """One sequence per row, unchanged: padding is on the right, where causal attention never sees it."""
    first = torch.arange(ids.shape[0], device=ids.device)
    return PackedRows(ids, None, first, torch.zeros_like(first))


def packed(ids: torch.Tensor, lengths: torch.Tensor) -> PackedRows:
    """Sequences end to end, in rows no wider than the longest: attention is never longer than with padding.

    `ids` [B, L], of which the first `lengths` [B] of each row are tokens. If no two fit into a row, `padded`.
    """
    places = _best_fit(lengths.tolist())
    row, start = torch.tensor(places, device=ids.device).unbind(1)
    shape = (int(row.max()) + 1, int(lengths.max()))
    if shape[0] == len(places):
        return padded(ids)
    columns = torch.arange(ids.shape[1], device=ids.device)
    sequence, at = (columns < lengths[:, None]).nonzero(as_tuple=True)
    there = row[sequence], start[sequence] + at
    laid = ids.new_zeros(shape)  # unused columns: sequences of one token each
    positions = ids.new_zeros(shape)
    laid[there] = ids[sequence, at]
    positions[there] = at
    return PackedRows(laid, positions, row, start)


def end_to_end(ids: torch.Tensor, lengths: torch.Tensor) -> PackedRows:
    """All sequences in one row, for attention that knows where each begins; nothing is padded."""
    columns = torch.arange(ids.shape[1], device=ids.device)
    sequence, at = (columns < lengths[:, None]).nonzero(as_tuple=True)
    start = lengths.cumsum(0) - lengths
    bounds = torch.cat([start, lengths.sum()[None]]).to(torch.int32)
    longest = int(lengths.max())
    attention = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return PackedRows(ids[sequence, at][None], at[None], torch.zeros_like(start), start, attention)


def packed_tokens(lengths: Sequence[int]) -> int:
    """Tokens that a model is given for sequences of these lengths by `packed`, with what is left over in rows."""
    return (max(row for row, _ in _best_fit(lengths)) + 1) * max(lengths)


def _best_fit(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(row, column) of each sequence: the longest first, each into the row with the least space left (Johnson 1973,
    "Near-optimal bin packing algorithms"); rows are as wide as the longest."""
    width = max(lengths)
    free = list[int]()
    places = [(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [row for row, left in enumerate(free) if left >= lengths[index]]
        row = min(fitting, key=free.__getitem__, default=len(free))
        if row == len(free):
            free.append(width)
        places[index] = (row, width - free[row])
        free[row] -= lengths[index]
    return places
