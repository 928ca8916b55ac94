"""What a step trains on: gated groups as padded tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from inflight.rollout.gate import GatedGroup, GatedRollout
from inflight.trainer.advantage import Advantage
from inflight.trainer.side_data import kept_sets, routed_experts, teacher_logprobs
from inflight.types import version_array, versions_of

NO_VERSION = -1
"""In `versions` and `lags` at positions that were not sampled: prompt and padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sequences, each its prompt, its completion and padding on the right up to the longest, L tokens.

    Every field but `scales` and `one_version` is [B, L] or [B, L, ...]; its entry at `[b, t]` belongs to the token
    `input_ids[b, t]`. Padding is on the right because causal attention then never sees it: no attention mask is
    needed.

    Example: prompt [7, 8] and completion [5, 6] beside a longer sequence give
    `input_ids=[7, 8, 5, 6, 0]`, `completion_mask=[F, F, T, T, F]`, `versions=[-1, -1, 3, 4, -1]`.
    """

    input_ids: torch.Tensor
    """[B, L] int64."""
    completion_mask: torch.Tensor
    """[B, L] bool, True where the token was sampled."""
    trained_mask: torch.Tensor
    """[B, L] bool, True where the gate accepts the token for the loss; a subset of `completion_mask`."""
    behaviour_logprobs: torch.Tensor
    """[B, L] float32, recorded by the generator when it sampled the token; 0 elsewhere."""
    versions: torch.Tensor
    """[B, L] int64, the version that sampled the token."""
    lags: torch.Tensor
    """[B, L] int64, number of versions by which the token is behind the trainer."""
    advantages: torch.Tensor
    """[B, L] float32, 0 where no token was sampled."""
    scales: torch.Tensor
    """[B] float32: the weight of each token of the sequence in the step's loss. Computed for the whole step before it
    is split into micro-batches and ranks, whose losses are then summed, however it is split."""
    one_version: torch.Tensor | None = None
    """[B] bool: all of the sequence's tokens, and all KV that they were sampled from, are of one version."""
    proximal_logprobs: torch.Tensor | None = None
    """[B, L] float32 under the weights before the batch's first update; None if these are the current weights, as with
    one update per batch."""
    teacher_logprobs: torch.Tensor | None = None
    """[B, L] float32; None unless a teacher scored every sequence."""
    kept: torch.Tensor | None = None
    """[B, L, K] int64, the tokens that the generator sampled from, padded with -1; all -1 if they were not recorded."""
    routed_experts: torch.Tensor | None = None
    """[B, L, layers, experts per token] int32, -1 where none was recorded; for mixture-of-experts models."""

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens, including masked ones."""
        return int(self.completion_mask.sum())

    def lag_counts(self) -> dict[int, int]:
        """Number of trained tokens by lag, ascending."""
        return dict(sorted(Counter(self.lags[self.trained_mask].tolist()).items()))

    def lengths(self) -> torch.Tensor:
        """[B] int64, number of tokens of each sequence, without padding."""
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (self.completion_mask.long() * positions).amax(dim=1) + 1

    def cut(self, size: int, *, mixed: bool = False) -> list[torch.Tensor]:
        """Splits the batch into parts of at most `size` sequences; the rows of each part, int64. They are of similar
        lengths, so that there is little padding, or with `mixed` lengths, so that short and long ones can be packed
        together."""
        order = self.lengths().argsort(descending=True, stable=True)
        count = math.ceil(len(order) / size)
        return [order[at::count] for at in range(count)] if mixed else list(order.split(size))

    def rows(self, rows: torch.Tensor) -> Batch:
        """Some of the sequences, cut to the longest of them; their scales do not change."""
        width = int(self.lengths()[rows].max())
        return self._map(lambda tensor: tensor[rows][:, :width] if tensor.ndim > 1 else tensor[rows])

    def to(self, device: torch.device) -> Batch:
        """A copy on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        changed: dict[str, Any] = {name: None if each is None else change(each) for name, each in values.items()}
        return Batch(**changed)


def to_score(input_ids: torch.Tensor, completion_mask: torch.Tensor) -> Batch:
    """A batch, [B, L] int64 and bool, of which the log-probabilities are wanted; nothing in it is trained on."""
    shape = input_ids.shape
    return Batch(
        input_ids=input_ids,
        completion_mask=completion_mask,
        trained_mask=torch.zeros_like(completion_mask),
        behaviour_logprobs=torch.zeros(shape),
        versions=torch.full(shape, NO_VERSION),
        lags=torch.full(shape, NO_VERSION),
        advantages=torch.zeros(shape),
        scales=torch.zeros(len(input_ids)),
    )


def collate(
    groups: Sequence[GatedGroup], *, advantage: Advantage, normalise: str, max_tokens: int, pad_id: int = 0
) -> Batch:
    """The members of the groups that the gate accepts, in order.

    Advantages are computed over all members, including dropped ones (see rollout/gate.py). `normalise` and
    `max_tokens`: see `scales`. Raises ValueError when there is nothing to train on or a sequence has no prompt.
    """
    members = [pair for group, worth in zip(groups, _worth(groups, advantage), strict=True) for pair in worth]
    if not members:
        raise ValueError("a batch of no sequences")
    gated = [each for each, _ in members]
    length = max(len(each.rollout.prompt_ids) + len(each.rollout.turn.token_ids) for each in gated)

    def blank(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((len(gated), length), value, dtype=dtype)

    batch = Batch(
        input_ids=blank(pad_id, torch.int64),
        completion_mask=blank(False, torch.bool),
        trained_mask=blank(False, torch.bool),
        behaviour_logprobs=blank(0, torch.float32),
        versions=blank(NO_VERSION, torch.int64),
        lags=blank(NO_VERSION, torch.int64),
        advantages=blank(0, torch.float32),
        scales=scales([int(each.mask.values.sum()) for each in gated], normalise, max_tokens),
        one_version=torch.tensor([len(versions_of(each.rollout.turn)) == 1 for each in gated]),
        teacher_logprobs=teacher_logprobs(gated, length),
        kept=kept_sets(gated, length),
        routed_experts=routed_experts(gated, length),
    )
    for row, (each, worth) in enumerate(members):
        _fill(batch, row, each, worth)
    return batch


def scales(trained: Sequence[int], normalise: str, max_tokens: int) -> torch.Tensor:
    """[B] float32, the weight of a token of each sequence; `trained`: trained tokens of each sequence of the step.

    `token`: 1 / (all trained tokens). `sequence`: 1 / (sequences * its own trained tokens). `constant`:
    1 / (sequences * max_tokens). Raises ValueError for another name.
    """
    if normalise == "token":
        weights = [1 / max(sum(trained), 1)] * len(trained)
    elif normalise == "sequence":
        weights = [1 / (len(trained) * max(own, 1)) for own in trained]
    elif normalise == "constant":
        weights = [1 / (len(trained) * max_tokens)] * len(trained)
    else:
        raise ValueError(f"normalise={normalise!r} is not allowed: token, sequence, constant")
    return torch.tensor(weights, dtype=torch.float32)


def _worth(groups: Sequence[GatedGroup], advantage: Advantage) -> list[list[tuple[GatedRollout, Any]]]:
    """For each group, its members to train on, with their advantages. Raises ValueError when their numbers differ."""
    found = []
    worth = advantage([each.group.rollouts for each in groups])
    given = [len(each) for each in worth]
    wanted = [len(each.group.rollouts) for each in groups]
    if given != wanted:
        raise ValueError(f"trainer.advantage gives groups of {given} values where the groups have {wanted} members")
    for group, advantages in zip(groups, worth, strict=True):
        by_id = {rollout.rollout_id: each for rollout, each in zip(group.group.rollouts, advantages, strict=True)}
        found.append([(each, by_id[each.rollout.rollout_id]) for each in group.rollouts])
    return found


def _fill(batch: Batch, row: int, gated: GatedRollout, worth: float | list[float]) -> None:
    prompt = gated.rollout.prompt_ids
    turn = gated.rollout.turn
    if not prompt:
        raise ValueError(f"{gated.rollout.rollout_id} has no prompt: its first token has no context")
    start = len(prompt)
    end = len(prompt) + len(turn.token_ids)
    ids = batch.input_ids.numpy()[row]
    ids[:start] = prompt.values
    ids[start:end] = turn.token_ids.values
    batch.completion_mask[row, start:end] = True
    batch.trained_mask.numpy()[row, start:end] = gated.mask.values
    batch.behaviour_logprobs.numpy()[row, start:end] = turn.logprobs.values
    batch.versions.numpy()[row, start:end] = version_array(turn.token_versions, len(turn.token_ids))
    batch.lags.numpy()[row, start:end] = gated.lags.values
    batch.advantages[row, start:end] = torch.tensor(worth, dtype=torch.float32)
