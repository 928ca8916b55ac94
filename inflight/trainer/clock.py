"""Seconds of a step by phase, and since the beginning of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Seconds of a step by phase."""

    def __init__(self, elapsed_s: float = 0.0) -> None:
        """`elapsed_s`: seconds of earlier starts of the run."""
        self._last = time.monotonic()
        self.began = self._last - elapsed_s
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the duration of the block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - started

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning of the run."""
        return time.monotonic() - self.began

    def lap(self) -> float:
        """Seconds since the last call, or since the beginning."""
        now = time.monotonic()
        elapsed = now - self._last
        self._last = now
        return elapsed
