"""Counts refused input of a socket by reason; logs each peer and reason at most once per interval."""

from __future__ import annotations

import collections
import logging
import time

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
MAX_KNOWN = 256
"""Most (peer, reason) pairs that are distinguished; a peer may use any name."""


class Refusals:
    """The refusals of one socket; used by its thread alone, except that any thread may read `total`."""

    def __init__(self, where: str) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._where = where
        self._silent: dict[tuple[str, str], tuple[float, int]] = {}
        """(peer, reason) → time until which it is not logged, and how many were refused since the last line."""

    @property
    def total(self) -> int:
        """Number of all refusals."""
        return self.counts.total()

    def add(self, peer: str, reason: str, detail: str = "") -> None:
        """Counts one refusal; `reason` is one of few, `detail` may be any text."""
        self.counts[reason] += 1
        now = time.monotonic()
        key = (peer, reason)
        if key not in self._silent and len(self._silent) >= MAX_KNOWN:
            self._silent = {known: state for known, state in self._silent.items() if state[0] > now}
            if len(self._silent) >= MAX_KNOWN:
                return  # counted only; a flood of names must not flood the log
        until, more = self._silent.get(key, (0.0, 0))
        if now < until:
            self._silent[key] = (until, more + 1)
            return
        self._silent[key] = (now + LOG_EVERY_S, 0)
        since = f", and {more} times since this was last logged" if more else ""
        log.warning("%s: refused from %s: %s%s%s", self._where, peer, reason, detail and f" ({detail[:200]})", since)
