"""A timeout for calls that have none: torch's TCPStore waits forever for a host that is suspended, not dead; NCCL waits
forever for a rank that is suspended while a communicator forms, and possibly while one ends."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result or error of `call`; TimeoutError when that takes longer than `limit_s` seconds.

    It runs in a thread of its own, which is abandoned when it is late: its later effects must not matter. Raises
    RuntimeError when no thread can be started, as at interpreter shutdown. Python ends a process by SIGABRT when a
    thread returns from such a call after the interpreter has ended: our processes end by `processes.leave`.
    """
    answers: list[T] = []
    errors: list[BaseException] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            errors.append(error)
        finally:
            done.release()

    # Not threading.Thread with a Future: both pass the GIL back and forth, which a decoding engine's threads need.
    _thread.start_new_thread(run, ())
    if not done.acquire(timeout=limit_s):
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if errors:
        raise errors.pop()
    return answers.pop()
