"""How far the clock of a listener's host is ahead of this one's, from the round trips of heartbeats.

As in NTP (RFC 5905, section 10): if an answer that was asked for at `asked` and has arrived at `came` bears the time
`there`, the other clock is ahead by `there - (asked + came) / 2`, and by at most half of `came - asked` more or less,
however the round trip divides into its two ways. So of the last samples the one with the least round trip is the best.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from inflight.messages import ClockOffset

KEPT = 64
"""Samples of which the best is used: about a minute of heartbeats, in which two clocks of 50 ppm drift by 3 ms."""


class RoundTrips:
    """The samples of one link; used by its thread alone."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the Unix time of this host in seconds."""
        self.now = clock
        self._samples: collections.deque[ClockOffset] = collections.deque(maxlen=KEPT)

    def answered(self, asked: float, there: float) -> None:
        """An answer has arrived now to a question of `asked`, by this clock, and of `there`, by the other one."""
        came = self.now()
        if asked <= came:  # else this clock was set back meanwhile
            self._samples.append(ClockOffset(there - (asked + came) / 2, came - asked))

    @property
    def best(self) -> ClockOffset | None:
        """The sample with the least round trip; None: there is none yet."""
        return min(self._samples, key=lambda each: each.round_trip_s, default=None)
