"""A time limit for what foreign code does with one row, in a process where it can't be killed by itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
AGAIN_S = 0.5
"""Seconds after which a call is interrupted again: an exception that is raised in a destructor, or in a callback of the
garbage collection, is lost."""


class _Expired(BaseException):
    """Not an Exception, which templates and tokenizers may catch."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`. Raises TimeoutError when it takes longer, or what it raises; for the main thread of a
    process, whose SIGALRM it uses.

    It interrupts Python code, regular expressions of Python and system calls. A function of another language that
    neither returns nor looks for signals is not interrupted.
    """
    running = True

    def expire(number: int, frame: FrameType | None) -> None:
        if running:
            raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
            return call()
        finally:
            running = False
    except _Expired:
        raise TimeoutError(f"it takes longer than rollout.reward_timeout_s={seconds:g}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
