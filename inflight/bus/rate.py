"""Limits how many messages a peer may send: one token bucket per peer."""

from __future__ import annotations

import time

PER_SECOND = 1000.0
BURST = 8192.0
"""Far above what any process of a run sends; messages beyond it are refused unread."""
MAX_PEERS = 1 << 14
"""Names that are distinguished at once: 1,024 generators, each with its engine and up to 15 ranks."""


class Rate:
    """The buckets of one socket's peers; used by its thread alone."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """Peer → remaining messages, and the time of that count."""

    def allows(self, peer: str) -> bool:
        """Takes one message from the peer's bucket; False when the bucket is empty or there are too many peers."""
        now = time.monotonic()
        if peer not in self._left and len(self._left) >= MAX_PEERS:
            self._left = {name: state for name, state in self._left.items() if now - state[1] < BURST / PER_SECOND}
            if len(self._left) >= MAX_PEERS:
                return False
        left, then = self._left.get(peer, (BURST, now))
        left = min(BURST, left + (now - then) * PER_SECOND)
        self._left[peer] = (max(0.0, left - 1), now)
        return left >= 1
