"""What the gate says of a group: records that its rules pass on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from inflight.types import Rollout, RolloutGroup


class SequenceDrop(StrEnum):
    """Why a member of a group is not trained on."""

    EMPTY = "no tokens"
    STALE = "too few fresh tokens"
    OLDEST = "oldest token too old"
    MEAN = "too old on average"


AGED = frozenset({SequenceDrop.STALE, SequenceDrop.OLDEST, SequenceDrop.MEAN})
"""Reasons that younger tokens would not have given."""


class GroupDrop(StrEnum):
    """Why a whole group is not trained on."""

    UNPUBLISHED = "version not published"
    SMALL = "fewer than 2 usable rollouts"
    INCOMPLETE = "a member was dropped"
    UNIFORM = "all rewards equal"
    RETRIED = "too old, to be sampled again"
    """By one of the above, for want of fresh members (`gate.on_stale`)."""
    NOT_FINITE = "gradient not finite"
    """It had passed the gate: of a batch whose gradient could not be used."""


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
    dropped: str | None
    """The reason, usually a GroupDrop."""
    members_dropped: dict[str, int]
    """Members left out by reason, usually a SequenceDrop, whether or not the group is kept."""
    masked: dict[str, int] = field(default_factory=dict)
    """Tokens masked by reason, of members that were dropped later too."""
    rules: tuple[str, ...] = ()
    """The rules that have masked or left out something, in their order."""

    @property
    def stale(self) -> bool:
        """Whether it is dropped for members that have grown too old."""
        incomplete = self.dropped is not None and self.dropped not in (GroupDrop.UNIFORM, GroupDrop.UNPUBLISHED)
        return incomplete and not AGED.isdisjoint(self.members_dropped)

    @property
    def left_out(self) -> list[Rollout]:
        """The members that are not trained on."""
        kept = {member.rollout.rollout_id for member in self.rollouts}
        return [rollout for rollout in self.group.rollouts if rollout.rollout_id not in kept]

    @property
    def rewards(self) -> list[float]:
        """[G] rewards of all members, dropped ones included: what the baseline is computed over."""
        return [rollout.reward for rollout in self.group.rollouts]
