"""The state of the rollout ledger: the part kept in a checkpoint, and the counters that are reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from inflight.messages.reasons import ACTOR_STOPPED
from inflight.rollout.questions import Indices
from inflight.types import Count

REASONS_NAMED = 3
"""Reasons named in a line about lost groups."""


class Books(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part that a checkpoint keeps: the questions settled up to its optimizer step, and the counters up to then."""

    settled_below: Count
    settled_beyond: list[Count]
    trained: Count
    dropped: dict[str, Count]
    failed: dict[str, Count]
    rollouts_dropped: dict[str, Count]
    ignored: dict[str, Count]
    too_old: dict[int, Count] = msgspec.field(default_factory=dict)
    """Unsettled question → how many of its groups were too stale (`gate.on_stale`)."""

    @property
    def settled(self) -> Indices:
        """The settled questions."""
        return Indices(self.settled_below, self.settled_beyond)


NO_BOOKS = Books(settled_below=0, settled_beyond=[], trained=0, dropped={}, failed={}, rollouts_dropped={}, ignored={})
"""The state of a new run."""


@dataclass(frozen=True)
class Counts:
    """How many groups are where; a snapshot."""

    granted: int
    in_flight: int
    produced: int
    buffered: int
    trained: int
    dropped: dict[str, int]
    """Groups that the gate dropped, by reason."""
    failed: dict[str, int]
    """Granted groups that were not delivered or could not be used, by reason; most of them were re-queued."""
    rollouts_dropped: dict[str, int]
    """Rollouts excluded from groups, whether the group was trained on or dropped, by reason."""
    ignored: dict[str, int]
    """Messages without effect, by reason: repeats of settled groups, groups that were never granted."""

    @property
    def lost(self) -> list[str]:
        """How many of the granted groups failed and how many were dropped, each with its most frequent reasons; and how
        many questions were re-queued because an actor was stopped, which loses no group."""
        again = self.failed.get(ACTOR_STOPPED, 0)
        failed = {reason: count for reason, count in self.failed.items() if reason != ACTOR_STOPPED}
        kinds = {"failed": failed, "were dropped by the gate": self.dropped}
        lost = [
            f"{sum(reasons.values())} of {self.granted - again} groups {what} ({_most(reasons)})"
            for what, reasons in kinds.items()
            if reasons
        ]
        return [*([f"{again} were re-queued after an interruption"] if again else []), *lost]

    def check(self) -> None:
        """Raises RuntimeError when a group was lost or counted twice."""
        failed = sum(self.failed.values())
        dropped = sum(self.dropped.values())
        if self.granted != self.in_flight + failed + self.produced:
            raise RuntimeError(f"granted is not in flight + failed + produced: {self}")
        if self.produced != self.trained + dropped + self.buffered:
            raise RuntimeError(f"produced is not trained + dropped + buffered: {self}")


def _most(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in Counter(reasons).most_common(REASONS_NAMED))
