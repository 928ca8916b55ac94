"""How many messages a peer may send: a token bucket each."""

from __future__ import annotations

import time

PER_SECOND = 1000.0
BURST = 8192.0
"""Far above what any party of a run sends; what is beyond is refused unread."""
MAX_PEERS = 1024


class Rate:
    """Of the peers of one socket; used by its thread alone."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """Peer → what it may still send, and as of when."""

    def allows(self, peer: str) -> bool:
        """Takes one message off the peer's bucket; False when it is empty, or for one peer too many."""
        now = time.monotonic()
        if peer not in self._left and len(self._left) >= MAX_PEERS:
            self._left = {name: state for name, state in self._left.items() if now - state[1] < BURST / PER_SECOND}
            if len(self._left) >= MAX_PEERS:
                return False
        left, then = self._left.get(peer, (BURST, now))
        left = min(BURST, left + (now - then) * PER_SECOND)
        self._left[peer] = (max(0.0, left - 1), now)
        return left >= 1
