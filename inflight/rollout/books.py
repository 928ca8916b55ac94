"""The books of a run as they are kept and as they are shown: counters, and the questions that are done with."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from inflight.rollout.questions import Indices
from inflight.types import Count


class Books(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps: the questions that its optimizer is done with, and the counters up to there."""

    settled_below: Count
    settled_beyond: list[Count]
    trained: Count
    dropped: dict[str, Count]
    failed: dict[str, Count]
    rollouts_dropped: dict[str, Count]
    ignored: dict[str, Count]
    too_old: dict[int, Count] = msgspec.field(default_factory=dict)
    """Of questions that are not done with: how often an answer was too old (`gate.on_stale`)."""

    @property
    def settled(self) -> Indices:
        """The questions that are done with."""
        return Indices(self.settled_below, self.settled_beyond)


NO_BOOKS = Books(
    settled_below=0, settled_beyond=[], trained=0, dropped={}, failed={}, rollouts_dropped={}, ignored={}
)  # fmt: skip
"""Of a run that begins."""


@dataclass(frozen=True)
class Counts:
    """Where every group is; a snapshot."""

    granted: int
    in_flight: int
    produced: int
    buffered: int
    trained: int
    dropped: dict[str, int]
    """Groups that the gate left out, by reason."""
    failed: dict[str, int]
    """Granted groups that never came or could not be used, by reason; most of them were asked again."""
    rollouts_dropped: dict[str, int]
    """Members left out of groups, whether the group was trained on or dropped, by reason."""
    ignored: dict[str, int]
    """Messages that changed nothing, by reason: repeats of settled groups, groups that nobody was granted."""

    def check(self) -> None:
        """Raises RuntimeError when a group was lost or counted twice."""
        failed, dropped = sum(self.failed.values()), sum(self.dropped.values())
        if self.granted != self.in_flight + failed + self.produced:
            raise RuntimeError(f"granted is not in flight + failed + produced: {self}")
        if self.produced != self.trained + dropped + self.buffered:
            raise RuntimeError(f"produced is not trained + dropped + buffered: {self}")
