"""Failures in a row: how they slow an actor down, and when it gives up.

Their duration counts, not their number: with one cause, as many groups fail together as are in flight.
"""

from __future__ import annotations

MAX_PAUSE_S = 5.0
MIN_PAUSE_S = 0.05
PROBE_AFTER = 20
"""Failures in a row after which groups are started one at a time, so that a temporary cause costs few questions."""


class Streak:
    """Times are monotonic seconds, given by the caller."""

    def __init__(self, give_up_after_s: float) -> None:
        self.give_up_after_s = give_up_after_s
        self._since: float | None = None
        """Time of the first failure that is an item's fault."""
        self._number = 0
        self._paused_until = 0.0

    def succeeded(self) -> None:
        """Records a finished group."""
        self._since = None
        self._number = 0
        self._paused_until = 0.0

    def failed(self, now: float, *, outage: bool) -> float:
        """Records a failed group; returns the seconds for which no other should be started, which grow with the
        duration of the streak.

        An `outage` of generators is no item's fault: however long it lasts, it does not count towards giving up.
        """
        if outage:
            self._since = None
            self._number = 0
        else:
            self._since = now if self._since is None else self._since
            self._number = self._number + 1
        lasted = 0.0 if self._since is None else now - self._since
        pause = min(MAX_PAUSE_S, max(MIN_PAUSE_S, lasted / 4))
        self._paused_until = now + pause
        return pause

    def hopeless(self, now: float) -> bool:
        """Whether items have failed for so long that the actor should give up."""
        return self._since is not None and self._number > 1 and now - self._since >= self.give_up_after_s

    def room(self, now: float, most: int) -> int:
        """How many of `most` groups may be in flight now."""
        if now < self._paused_until:
            return 0
        return most if self._number < PROBE_AFTER else 1
