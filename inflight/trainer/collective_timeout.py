"""A timeout for what can't be interrupted: a collective that a rank does not join waits inside the driver."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bounded(seconds: float, why: Callable[[], str]) -> Iterator[None]:
    """Ends this process, with code 1 and the line that `why` returns, when the block takes longer."""
    timer = threading.Timer(seconds, _end, [why])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(why: Callable[[], str]) -> None:
    try:
        print(f"inflight trainer: {why()}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)  # an exception would not reach the main thread, which is blocked
