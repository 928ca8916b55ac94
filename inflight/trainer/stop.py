"""Whether a trainer was asked to stop."""

from __future__ import annotations


class Stop:
    """Set by a signal's handler, which another signal may interrupt: so it takes no lock, as threading.Event does, and
    would then wait for itself for ever."""

    def __init__(self) -> None:
        self._asked = False

    def set(self) -> None:
        """It was asked to."""
        self._asked = True

    def is_set(self) -> bool:
        """Whether it was."""
        return self._asked
