"""Ends a process together with everything that it has started.

A process that has called `adopt` becomes the parent of its descendants' orphans, daemons included: they are found below
it while it lives, and pass to the next such process above it when it ends.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection

import psutil

from inflight.processes import KILL_WAIT_S, adopt_orphans, kill_all, living_of

_others: set[int] | None = None
"""Children that this process had before it called `adopt`; None: it has not called it."""


def adopt() -> None:
    """Makes this process the parent of its descendants' orphans. Raises OSError."""
    global _others
    _others = {child.pid for child in psutil.Process().children()}
    adopt_orphans()


def kill_tree(pid: int, *, reap: bool = True) -> None:
    """Sends SIGKILL to a process that has called `adopt`, and to all its descendants. It is suspended first, so that it
    starts no more of them. Does nothing if it has ended.

    `reap`: False for a child whose exit code is collected elsewhere. Takes at most twice processes.KILL_WAIT_S plus one
    second.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        root.send_signal(signal.SIGSTOP)
        kill_all(lambda: living_of(root.children(recursive=True)))
        root.kill()
        if reap:
            with contextlib.suppress(psutil.TimeoutExpired):
                root.wait(KILL_WAIT_S)  # else a child of this process would stay a zombie


def orphans(own: Collection[int]) -> list[int]:
    """Children of this process that are not in `own`: adopted orphans. [] if it has not called `adopt`."""
    if _others is None:
        return []
    return [child.pid for child in psutil.Process().children() if child.pid not in own and child.pid not in _others]
