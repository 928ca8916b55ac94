"""What a socket was sent and did not take: counted by reason, logged at most once a peer and reason in a while."""

from __future__ import annotations

import collections
import logging
import time

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
MAX_KNOWN = 256
"""Peers and reasons that are told apart; a peer may call itself anything."""


class Refusals:
    """Of one socket; used by its thread alone, `total` may be read by any."""

    def __init__(self, where: str) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._where = where
        self._silent: dict[tuple[str, str], tuple[float, int]] = {}
        """Peer and reason → until when nothing is logged, and how many came since."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total()

    def add(self, peer: str, reason: str, detail: str = "") -> None:
        """Counts one; `reason` is one of few, the rest goes into `detail`."""
        self.counts[reason] += 1
        now, key = time.monotonic(), (peer, reason)
        if key not in self._silent and len(self._silent) >= MAX_KNOWN:
            self._silent = {known: state for known, state in self._silent.items() if state[0] > now}
            if len(self._silent) >= MAX_KNOWN:
                return  # counted; a flood of names must not flood the log
        until, more = self._silent.get(key, (0.0, 0))
        if now < until:
            self._silent[key] = (until, more + 1)
            return
        self._silent[key] = (now + LOG_EVERY_S, 0)
        since = f", and {more} times since this was last told" if more else ""
        log.warning("%s: refused from %s: %s%s%s", self._where, peer, reason, detail and f" ({detail[:200]})", since)
