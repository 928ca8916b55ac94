"""Data recorded beside the tokens, as tensors of a batch: teacher log-probabilities, kept sets, routed experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inflight.rollout.gate import GatedRollout
from inflight.types import RoutedExperts

ABSENT = -1


def teacher_logprobs(members: Sequence[GatedRollout], length: int) -> torch.Tensor | None:
    """[B, length] float32; None unless every member was scored by a teacher."""
    filled = torch.zeros(len(members), length)
    for row, each in enumerate(members):
        scored = each.rollout.teacher_logprobs
        if scored is None:
            return None
        start = len(each.rollout.prompt_ids)
        filled.numpy()[row, start : start + len(scored)] = scored.values
    return filled


def kept_sets(members: Sequence[GatedRollout], length: int) -> torch.Tensor | None:
    """[B, length, K] int64, K the size of the largest recorded set; padded with ABSENT. None when no member has one."""
    widest = max((each.rollout.turn.kept.widest for each in members if each.rollout.turn.kept is not None), default=0)
    if not widest:
        return None
    filled = torch.full((len(members), length, widest), ABSENT, dtype=torch.int64)
    for row, each in enumerate(members):
        if (sets := each.rollout.turn.kept) is not None:
            start = len(each.rollout.prompt_ids)
            given = np.arange(widest) < sets.counts[:, None]  # [T, K], which places hold an id
            own = np.full(given.shape, ABSENT, np.int64)
            own[given] = sets.ids
            filled[row, start : start + len(sets)] = torch.from_numpy(own)
    return filled


def routed_experts(members: Sequence[GatedRollout], length: int) -> torch.Tensor | None:
    """[B, length, layers, experts per token] int32, ABSENT where none was recorded; None when no member has any.

    Raises ValueError when layers or experts differ between members.
    """
    recorded = [(row, each.rollout.turn.routed_experts) for row, each in enumerate(members)]
    arrays = [(row, _array(experts)) for row, experts in recorded if experts is not None]
    if not arrays:
        return None
    shapes = {array.shape[1:] for _, array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"routed experts of different shapes: {sorted(shapes)}")
    filled = torch.full((len(members), length, *shapes.pop()), ABSENT, dtype=torch.int32)
    for row, array in arrays:
        filled[row, : len(array)] = torch.from_numpy(array)[:length]
    return filled


def _array(experts: RoutedExperts) -> np.ndarray:
    return np.frombuffer(experts.data, dtype=f"<u{experts.bytes_each}").reshape(experts.shape).astype(np.int32)
