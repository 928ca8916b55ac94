"""A gate that lets nothing pass: noticed after a bounded number of groups, and by which of its rules."""

from __future__ import annotations

from collections import Counter

from inflight.rollout.gated import GatedGroup

LEAST = 16
"""Groups that are judged before anything is said, at the least."""


class Drought:
    """Groups that were dropped since the last one that passed."""

    def __init__(self, step: int) -> None:
        """`step` groups make a batch: it is told once two batches' worth were dropped, then at each doubling."""
        self._first = max(LEAST, 2 * step)
        self._news: str | None = None
        self._reset()

    def _reset(self) -> None:
        self.groups, self._told_at = 0, self._first
        self._reasons, self._members, self._rules = Counter[str](), Counter[str](), Counter[str]()

    def judged(self, gated: GatedGroup) -> None:
        """Counts a verdict of the gate."""
        if gated.dropped is None:
            self._reset()
            return
        self.groups += 1
        self._reasons[str(gated.dropped)] += 1
        self._members.update({str(why): count for why, count in gated.members_dropped.items()})
        self._rules.update(gated.rules)
        if self.groups == self._told_at:
            self._news, self._told_at = str(self), 2 * self.groups

    def news(self) -> str | None:
        """A line when one is due; None when not."""
        news, self._news = self._news, None
        return news

    def __str__(self) -> str:
        """Empty while something passes."""
        if not self.groups:
            return ""
        text = f"the gate has let nothing pass: {self.groups} groups dropped in a row ({_counts(self._reasons)})"
        if self._rules:
            text += f", by {_counts(self._rules)}"
        if self._members:
            text += f"; rollouts left out of them: {_counts(self._members)}"
        return text


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.most_common())
