"""Detects a gate that drops everything, after a bounded number of groups, and which of its rules do so."""

from __future__ import annotations

from collections import Counter

from inflight.rollout.gate_result import GatedGroup

LEAST = 16
"""Fewest groups that are judged before a warning."""


class Drought:
    """Groups that were dropped since the last one that passed."""

    def __init__(self, step: int) -> None:
        """`step` groups make a batch. The warning is due after two dropped batches, then at each doubling."""
        self._first = max(LEAST, 2 * step)
        self._news: str | None = None
        self._reset()

    def _reset(self) -> None:
        self.groups = 0
        self._told_at = self._first
        self._reasons = Counter[str]()
        self._members = Counter[str]()
        self._rules = Counter[str]()

    def judged(self, gated: GatedGroup) -> None:
        """Counts a result of the gate."""
        if gated.dropped is None:
            self._reset()
            return
        self.groups += 1
        self._reasons[str(gated.dropped)] += 1
        self._members.update({str(why): count for why, count in gated.members_dropped.items()})
        self._rules.update(gated.rules)
        if self.groups == self._told_at:
            self._news = str(self)
            self._told_at = 2 * self.groups

    def news(self) -> str | None:
        """The warning when one is due, else None."""
        news, self._news = self._news, None
        return news

    def __str__(self) -> str:
        """Empty while groups pass."""
        if not self.groups:
            return ""
        text = f"the gate drops everything: {self.groups} groups dropped in a row ({_counts(self._reasons)})"
        if self._rules:
            text += f", by {_counts(self._rules)}"
        if self._members:
            text += f"; rollouts excluded from them: {_counts(self._members)}"
        return text


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.most_common())
