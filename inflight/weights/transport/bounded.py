"""A bound for calls that have none: torch's TCPStore waits for its host for ever when that is stopped, not dead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError when that takes longer than `limit_s` seconds.

    It runs in a thread of its own, which is left behind when it is late: what it still does must harm nobody.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            answer.set_exception(error)

    threading.Thread(target=run, name="bounded", daemon=True).start()
    if not wait([answer], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()
