"""What a step trains on: gated groups as padded tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from inflight.rollout.gate import GatedGroup, GatedRollout
from inflight.trainer.advantage import group_relative
from inflight.types import versions_of_tokens

NO_VERSION = -1
"""In `versions` and `lags` where no token was sampled: prompt and padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sequences, each its prompt, its completion and padding on the right up to the longest, L tokens.

    Every field but `advantages` is [B, L] and speaks at `[b, t]` of the token `input_ids[b, t]`. Padding stands on
    the right because causal attention then never sees it: no attention mask is needed.

    Example: prompt [7, 8] and completion [5, 6] beside a longer sequence give
    `input_ids=[7, 8, 5, 6, 0]`, `completion_mask=[F, F, T, T, F]`, `versions=[-1, -1, 3, 4, -1]`.
    """

    input_ids: torch.Tensor
    """[B, L] int64."""
    completion_mask: torch.Tensor
    """[B, L] bool, True where the token was sampled."""
    trained_mask: torch.Tensor
    """[B, L] bool, True where the gate lets the token into the loss; a subset of `completion_mask`."""
    behaviour_logprobs: torch.Tensor
    """[B, L] float32, what the generator recorded when it sampled the token; 0 elsewhere."""
    versions: torch.Tensor
    """[B, L] int64, the version that sampled the token."""
    lags: torch.Tensor
    """[B, L] int64, versions that the token is behind the trainer."""
    advantages: torch.Tensor
    """[B] float32."""

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss: what its sum is divided by."""
        return int(self.trained_mask.sum())

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens, masked ones included."""
        return int(self.completion_mask.sum())

    def lag_counts(self) -> dict[int, int]:
        """Trained tokens by lag, ascending."""
        return dict(sorted(Counter(self.lags[self.trained_mask].tolist()).items()))

    def micro_batches(self, size: int) -> list[Batch]:
        """Parts of at most `size` sequences of similar lengths, each cut to its own longest."""
        order = (self.completion_mask.long() * _positions(self)).amax(dim=1).argsort(descending=True, stable=True)
        return [self._rows(rows) for rows in order.split(size)]

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(**{each.name: getattr(self, each.name).to(device) for each in fields(self)})

    def _rows(self, rows: torch.Tensor) -> Batch:
        width = int((self.completion_mask[rows].long() * _positions(self)).max()) + 1
        tensors = {each.name: getattr(self, each.name)[rows] for each in fields(self)}
        return Batch(**{name: each[:, :width] if each.ndim == 2 else each for name, each in tensors.items()})


def collate(groups: Sequence[GatedGroup], *, scale_by_std: bool, pad_id: int = 0) -> Batch:
    """The members of the groups that the gate lets through, in order.

    A group's advantages are taken over the rewards of all its members, dropped ones too (see rollout/gate.py).
    Raises ValueError when there is nothing to train on or a sequence has no prompt.
    """
    members = [(each, advantage) for group in groups for each, advantage in _advantages(group, scale_by_std)]
    if not members:
        raise ValueError("a batch of no sequences")
    length = max(len(each.rollout.prompt_ids) + len(each.rollout.turn.token_ids) for each, _ in members)
    batch = Batch(
        input_ids=torch.full((len(members), length), pad_id, dtype=torch.int64),
        completion_mask=torch.zeros((len(members), length), dtype=torch.bool),
        trained_mask=torch.zeros((len(members), length), dtype=torch.bool),
        behaviour_logprobs=torch.zeros((len(members), length), dtype=torch.float32),
        versions=torch.full((len(members), length), NO_VERSION, dtype=torch.int64),
        lags=torch.full((len(members), length), NO_VERSION, dtype=torch.int64),
        advantages=torch.tensor([advantage for _, advantage in members], dtype=torch.float32),
    )
    for row, (each, _) in enumerate(members):
        _fill(batch, row, each)
    return batch


def _advantages(group: GatedGroup, scale_by_std: bool) -> list[tuple[GatedRollout, float]]:
    advantages = group_relative(group.rewards, scale_by_std=scale_by_std)
    by_id = {rollout.rollout_id: each for rollout, each in zip(group.group.rollouts, advantages, strict=True)}
    return [(each, by_id[each.rollout.rollout_id]) for each in group.rollouts]


def _fill(batch: Batch, row: int, gated: GatedRollout) -> None:
    prompt, turn = gated.rollout.prompt_ids, gated.rollout.turn
    if not prompt:
        raise ValueError(f"{gated.rollout.rollout_id} has no prompt: its first token has nothing to depend on")
    start, end = len(prompt), len(prompt) + len(turn.token_ids)
    batch.input_ids[row, :end] = torch.tensor([*prompt, *turn.token_ids])
    batch.completion_mask[row, start:end] = True
    batch.trained_mask[row, start:end] = torch.tensor(gated.mask)
    batch.behaviour_logprobs[row, start:end] = torch.tensor(turn.logprobs, dtype=torch.float32)
    batch.versions[row, start:end] = torch.tensor(versions_of_tokens(turn.token_versions, len(turn.token_ids)))
    batch.lags[row, start:end] = torch.tensor(gated.lags)


def _positions(batch: Batch) -> torch.Tensor:
    return torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
