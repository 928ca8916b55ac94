"""How a process comes to end with its parent, whatever ends that and however busy this one is."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import select
import signal
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when its parent ends, however that ends and whatever this one does
    then. Ends it at once when `parent` is its parent no more.

    For the kernel the thread that started this process is its parent: that has to be one which lives as long as its
    process, the main thread say. And it asks on behalf of the thread that calls this, which has to live on as well.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above took effect


@functools.cache
def end_with_parent() -> None:
    """Has this process killed when its parent ends, if multiprocessing has started it, and each process that it forks
    from its main thread when this one ends."""
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        watching = threading.Event()
        arguments = (parent.pid, watching)
        threading.Thread(target=_end_with_process, args=arguments, name="end with parent", daemon=True).start()
        watching.wait()
    forker: list[int] = []

    def before() -> None:
        forker[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        if forker:
            end_with(forker[0])

    os.register_at_fork(before=before, after_in_child=in_child)


def _end_with_process(parent: int, watching: threading.Event) -> None:
    """A thread's work. It watches the parent's process and, once this one has its main thread for a parent, has the
    kernel watch too, which works while this process hangs with Python's lock held.

    Before, the parent may be a thread that ends: vLLM 0.33 starts its workers from a pool of threads. Then the kernel
    gives its children to the main thread.
    """
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    ended: list[int] = []
    while not ended:
        by_kernel = _is_child_of_main_thread(parent)
        if by_kernel:
            end_with(parent)
        watching.set()
        ended, _, _ = select.select([watched], [], [], None if by_kernel else 0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_child_of_main_thread(parent: int) -> bool:
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:  # it is gone, or this kernel does not tell
        return False
    return str(os.getpid()) in children.split()
