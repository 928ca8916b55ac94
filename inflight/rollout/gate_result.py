"""The gate's result for a group: the records that rules take and return."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from inflight.arrays import Flags, Lags
from inflight.types import Rollout, RolloutGroup


class SequenceDrop(StrEnum):
    """Why a member of a group is not trained on."""

    EMPTY = "no tokens"
    STALE = "too few fresh tokens"
    OLDEST = "oldest token too old"
    MEAN = "too old on average"
    TRUNCATED = "cut off by length"


AGED = frozenset({SequenceDrop.STALE, SequenceDrop.OLDEST, SequenceDrop.MEAN})
"""Reasons that depend on the age of tokens."""


class GroupDrop(StrEnum):
    """Why a whole group is not trained on."""

    UNPUBLISHED = "version not published"
    INCOMPLETE = "a member was dropped"
    UNIFORM = "all rewards equal"
    RETRIED = "too old, to be sampled again"
    """Dropped for one of the reasons above because members are too stale (`gate.on_stale`)."""
    NOT_FINITE = "gradient not finite"
    """Passed the gate, but the gradient of its batch could not be used."""


@dataclass(frozen=True, slots=True)
class GatedRollout:
    """A sequence with the gate's decision on each of its tokens.

    Example: at version 9 with `max_token_lag=8`, spans `[(0, 0), (3, 5)]` over 5 tokens give `lags=[9, 9, 9, 4, 4]`
    and `mask=[False, False, False, True, True]`.
    """

    rollout: Rollout
    mask: Flags
    """[T] True where the token is trained on."""
    lags: Lags
    """[T] version now minus the token's version, 0 or more."""

    def __post_init__(self) -> None:
        # A user's rule may give lists.
        if not isinstance(self.mask, Flags):
            object.__setattr__(self, "mask", Flags(self.mask))
        if not isinstance(self.lags, Lags):
            object.__setattr__(self, "lags", Lags(self.lags))


@dataclass(frozen=True, slots=True)
class GatedGroup:
    """A group with the gate's decision."""

    group: RolloutGroup
    version: int
    """The version from which lags are counted."""
    rollouts: list[GatedRollout]
    """The members to train on; empty when the group is dropped."""
    dropped: str | None
    """The reason, usually a GroupDrop."""
    members_dropped: dict[str, int]
    """Number of members excluded, by reason (usually a SequenceDrop), whether or not the group is kept."""
    masked: dict[str, int] = field(default_factory=dict)
    """Number of tokens masked, by reason; includes members that were dropped later."""
    rules: tuple[str, ...] = ()
    """The rules that have masked or excluded something, in their order."""

    @property
    def stale(self) -> bool:
        """Whether it is dropped because members are too stale."""
        incomplete = self.dropped is not None and self.dropped not in (GroupDrop.UNIFORM, GroupDrop.UNPUBLISHED)
        return incomplete and not AGED.isdisjoint(self.members_dropped)

    @property
    def left_out(self) -> list[Rollout]:
        """The members that are not trained on."""
        kept = {member.rollout.rollout_id for member in self.rollouts}
        return [rollout for rollout in self.group.rollouts if rollout.rollout_id not in kept]

    @property
    def rewards(self) -> list[float]:
        """[G] rewards of all members, including dropped ones; the baseline is computed from them."""
        return [rollout.reward for rollout in self.group.rollouts]
