"""Signals that end a run."""

from __future__ import annotations

import signal
from types import FrameType

from inflight.exits import heeded_signals


class Interrupt:
    """While entered, records Ctrl-C, SIGTERM and SIGHUP instead of dying from them. One that this process ignores stays
    ignored."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in heeded_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
