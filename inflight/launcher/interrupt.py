"""Signals that end a run."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupt:
    """While entered, records Ctrl-C, SIGTERM and SIGHUP instead of dying from them."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def __enter__(self) -> Interrupt:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and so does this process then
            numbers.append(signal.SIGHUP)  # sent when the terminal is closed
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
