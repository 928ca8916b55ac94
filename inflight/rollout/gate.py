"""The gate: what an old token may still do, judged when a batch is taken. Pure functions, no clock, no state.

Three rules, from the inside out:

1. token: `lag = version now - version that sampled it`; above `max_token_lag` the token is masked. It takes no part
   in the loss but stays in the sequence, as context of the tokens after it.
2. sequence: dropped when no token is left, or when the unmasked share is below `min_trained_share`.
3. group: dropped when fewer than two usable sequences are left (an advantage relative to nothing means nothing), or
   when a token claims a version that was never published.

Rewards of *all* members of a kept group count for its baseline, those of dropped members too: they answer the same
prompt and their rewards are as good as any. Leaving them out would favour short answers, because the long ones are
those that grow old. So advantages are taken over `GatedGroup.rewards`, and only `GatedGroup.rollouts` are trained on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from inflight.config import GateConfig
from inflight.types import Rollout, RolloutGroup, versions_of_tokens

MIN_GROUP = 2
"""Sequences that a group must keep for a relative advantage."""


class SequenceDrop(StrEnum):
    """Why a member of a group is not trained on."""

    EMPTY = "no tokens"
    STALE = "too few fresh tokens"


class GroupDrop(StrEnum):
    """Why a whole group is not trained on."""

    UNPUBLISHED = "version not published"
    SMALL = "fewer than 2 usable rollouts"


@dataclass(frozen=True, slots=True)
class GatedRollout:
    """A sequence with the gate's verdict on each of its tokens.

    Example: at version 9 with `max_token_lag=8`, spans `[(0, 0), (3, 5)]` over 5 tokens give `lags=[9, 9, 9, 4, 4]`
    and `mask=[False, False, False, True, True]`.
    """

    rollout: Rollout
    mask: list[bool]
    """[T] True where the token is trained on."""
    lags: list[int]
    """[T] version now minus the token's version, 0 or more."""


@dataclass(frozen=True, slots=True)
class GatedGroup:
    """A group with the gate's verdict."""

    group: RolloutGroup
    version: int
    """The version that lags were judged against."""
    rollouts: list[GatedRollout]
    """The members to train on; empty when the group is dropped."""
    dropped: GroupDrop | None
    members_dropped: dict[SequenceDrop, int]
    """Members left out by reason, whether or not the group is kept."""

    @property
    def rewards(self) -> list[float]:
        """[G] rewards of all members, dropped ones included: what the baseline is computed over."""
        return [rollout.reward for rollout in self.group.rollouts]


def token_lags(rollout: Rollout, version: int) -> list[int]:
    """[T] how many versions each token is behind `version`; negative for a version not published yet.

    Raises ValueError when the spans do not fit the tokens.
    """
    turn = rollout.turn
    return [version - each for each in versions_of_tokens(turn.token_versions, len(turn.token_ids))]


def gate_rollout(rollout: Rollout, version: int, config: GateConfig) -> GatedRollout | SequenceDrop:
    """The token and sequence rules. Raises ValueError when the spans do not fit the tokens."""
    lags = token_lags(rollout, version)
    if not lags:
        return SequenceDrop.EMPTY
    mask = [lag <= config.max_token_lag for lag in lags]
    kept = sum(mask)
    if kept == 0 or kept / len(mask) < config.min_trained_share:
        return SequenceDrop.STALE
    return GatedRollout(rollout, mask, lags)


def gate_group(group: RolloutGroup, version: int, config: GateConfig) -> GatedGroup:
    """All three rules on one group at trainer version `version`. Raises ValueError when spans do not fit tokens."""
    if any(span.version > version for rollout in group.rollouts for span in rollout.turn.token_versions):
        return GatedGroup(group, version, [], GroupDrop.UNPUBLISHED, {})
    verdicts = [gate_rollout(rollout, version, config) for rollout in group.rollouts]
    kept = [verdict for verdict in verdicts if isinstance(verdict, GatedRollout)]
    dropped = dict(Counter(verdict for verdict in verdicts if isinstance(verdict, SequenceDrop)))
    if len(kept) < MIN_GROUP:
        return GatedGroup(group, version, [], GroupDrop.SMALL, dropped)
    return GatedGroup(group, version, kept, None, dropped)
