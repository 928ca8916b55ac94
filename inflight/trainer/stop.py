"""Whether a trainer was asked to stop."""

from __future__ import annotations


class StopFlag:
    """Set from a signal handler. Not a threading.Event: its lock is not reentrant, so a second signal during `set`
    would deadlock."""

    def __init__(self) -> None:
        self._asked = False

    def set(self) -> None:
        """Requests the stop."""
        self._asked = True

    def is_set(self) -> bool:
        """Whether a stop was requested."""
        return self._asked
