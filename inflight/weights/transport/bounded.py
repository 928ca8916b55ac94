"""A bound for calls that have none: torch's TCPStore waits for its host for ever when that is stopped, not dead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError when that takes longer than `limit_s` seconds.

    It runs in a thread of its own, which is left behind when it is late: what it still does must harm nobody.
    """
    answers: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            answers.put((False, error))

    threading.Thread(target=run, name="bounded", daemon=True).start()
    try:
        well, answer = answers.get(timeout=max(0.0, limit_s))
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    if not well:
        assert isinstance(answer, BaseException)
        raise answer
    return answer  # type: ignore[return-value] # as its first part says
