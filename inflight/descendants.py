"""A process and all that it starts, so that its end is the end of all of them.

A process that has called `adopt` is the parent of whatever its descendants leave behind, daemons included: they are
found below it as long as it lives, and pass to the next such process above when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Collection

import psutil

from inflight.processes import KILL_WAIT_S, kill_all, living_of

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_others: set[int] | None = None
"""Children that this process had before it adopted; None while it does not."""


def adopt() -> None:
    """From now on this process is the parent of what its descendants leave. Raises OSError."""
    global _others
    _others = {child.pid for child in psutil.Process().children()}
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "can't adopt orphans (PR_SET_CHILD_SUBREAPER)")


def kill_tree(pid: int, *, reap: bool = True) -> None:
    """SIGKILL to a process that adopts, and to all below it. It is stopped first, so that it starts nothing more.

    `reap`: not for a child whose exit code somebody else asks for. Takes at most twice processes.KILL_WAIT_S and a
    second. Nothing happens when it is gone.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        root.send_signal(signal.SIGSTOP)
        kill_all(lambda: living_of(root.children(recursive=True)))
        root.kill()
        if reap:
            with contextlib.suppress(psutil.TimeoutExpired):
                root.wait(KILL_WAIT_S)  # a child of this process would stay a zombie


def orphans(own: Collection[int]) -> list[int]:
    """Children of this process that are none of its `own`: what those have left behind; [] where it does not adopt."""
    if _others is None:
        return []
    return [child.pid for child in psutil.Process().children() if child.pid not in own and child.pid not in _others]
