"""Makes a process end with its parent, for whatever reason the parent ends and however busy this process is."""

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
    """Makes the kernel send this process a signal when its parent ends, for whatever reason and whatever this process
    is doing. Exits at once when `parent` is no longer its parent.

    The kernel treats the thread that started this process as its parent: that thread must live as long as its process,
    such as the main thread. The thread that calls this function must stay alive as well.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above took effect


@functools.cache
def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, if multiprocessing started it, and kill each process
    that this one forks from its main thread when this one ends."""
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
    """Runs in a thread. It watches the parent's process and, once this process has the parent's main thread as its
    parent, also registers with the kernel, which works even while this process hangs with the GIL held.

    Before that, the parent may be a thread that ends: vLLM 0.33 starts its workers from a thread pool. When such a
    thread ends, the kernel makes the main thread the parent of its children.
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
    except OSError:  # the process is gone, or this kernel has no such file
        return False
    return str(os.getpid()) in children.split()
