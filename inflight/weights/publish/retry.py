"""When a generator that failed to get the newest version is sent it again."""

from __future__ import annotations

MAX_RETRY_S = 60.0


class Retry:
    """Delays double from one failure to the next, up to MAX_RETRY_S; a commit clears them."""

    def __init__(self) -> None:
        self.failures = 0
        """Attempts that failed since the last commit."""
        self.trouble = ""
        """Why the last of them did."""
        self.at = 0.0
        """When the next one may begin, in the clock's seconds."""

    def failed(self, now: float, first_s: float, trouble: str) -> None:
        """An attempt failed; after the first one the delay is `first_s` seconds."""
        self.at = now + min(first_s * 2.0 ** min(self.failures, 16), MAX_RETRY_S)
        self.failures, self.trouble = self.failures + 1, trouble

    def at_once(self) -> None:
        """Another version is there: it need not wait for what the last one failed of."""
        self.at = 0.0

    def clear(self) -> None:
        """All went well."""
        self.failures, self.trouble, self.at = 0, "", 0.0
