"""When a failed transfer of the newest version is retried."""

from __future__ import annotations

MAX_RETRY_S = 60.0


class Backoff:
    """Delays double with each failure, up to MAX_RETRY_S; a commit resets them."""

    def __init__(self) -> None:
        self.failures = 0
        """Attempts that failed since the last commit."""
        self.trouble = ""
        """The reason of the last failure."""
        self.at = 0.0
        """When the next attempt may begin, in the clock's seconds."""

    def failed(self, now: float, first_s: float, trouble: str) -> None:
        """Records a failed attempt; after the first one the delay is `first_s` seconds."""
        self.at = now + min(first_s * 2.0 ** min(self.failures, 16), MAX_RETRY_S)
        self.failures = self.failures + 1
        self.trouble = trouble

    def at_once(self) -> None:
        """Removes the delay, because there is another version."""
        self.at = 0.0

    def clear(self) -> None:
        """Records a commit."""
        self.failures = 0
        self.trouble = ""
        self.at = 0.0
