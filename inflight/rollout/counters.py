"""The buffer's counters."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from inflight.rollout.books import Books, Counts
from inflight.rollout.gate_result import GatedGroup
from inflight.rollout.questions import Indices

MAX_REASONS = 64
"""Distinct reasons counted by name; further ones are counted as `other`."""


class GroupCounters:
    """How many groups were granted, failed, came, were dropped and trained on, since the beginning of the run."""

    def __init__(self, books: Books, buffered: int) -> None:
        """Continues from `books`, with so many groups buffered."""
        self.trained = books.trained
        self._dropped = collections.Counter(books.dropped)
        self._failed = collections.Counter(books.failed)
        self._rollouts_dropped = collections.Counter(books.rollouts_dropped)
        self._ignored = collections.Counter(books.ignored)
        self.produced = self.trained + self._dropped.total() + buffered
        self.granted = self.produced + self._failed.total()

    def fail(self, reason: str) -> None:
        """Counts a granted group that does not come."""
        known = reason in self._failed or len(self._failed) < MAX_REASONS
        self._failed[reason if known else "other"] += 1

    def drop(self, reason: str, groups: int = 1) -> None:
        """Counts groups that are not trained on."""
        self._dropped[reason] += groups

    def judged(self, gated: GatedGroup) -> None:
        """Counts the rollouts that the gate left out of a group."""
        self._rollouts_dropped.update({str(why): count for why, count in gated.members_dropped.items()})

    def ignore(self, reason: str) -> None:
        """Counts a message without effect."""
        self._ignored[reason] += 1

    def books(self, settled: Indices, too_old: Mapping[int, int]) -> Books:
        """The part that a checkpoint keeps."""
        return Books(
            settled_below=settled.below,
            settled_beyond=settled.beyond,
            trained=self.trained,
            dropped=dict(self._dropped),
            failed=dict(self._failed),
            rollouts_dropped=dict(self._rollouts_dropped),
            ignored=dict(self._ignored),
            too_old=dict(too_old),
        )

    def counts(self, *, in_flight: int, buffered: int) -> Counts:
        """A snapshot."""
        return Counts(
            granted=self.granted,
            in_flight=in_flight,
            produced=self.produced,
            buffered=buffered,
            trained=self.trained,
            dropped=dict(self._dropped),
            failed=dict(self._failed),
            rollouts_dropped=dict(self._rollouts_dropped),
            ignored=dict(self._ignored),
        )
