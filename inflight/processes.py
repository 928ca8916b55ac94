"""Has the processes of a run started (starters/), notices when one ends, and ends all their descendants.

The launcher adopts orphans of its processes (such as a generator's engine and workers), so that `stop` finds every
descendant on this host, however it was started. Those on other hosts end by their leases.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from inflight.exits import explained
from inflight.starters.base import Command, Handle, Starter
from inflight.starters.local import LocalStarter

KILL_WAIT_S = 3.0
"""Seconds that processes get to disappear after SIGKILL."""
THERE_S = 4.0
"""Seconds that processes on other hosts get in addition: they have the same grace, and their end is heard of later."""
_POLL_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Ended:
    """A process that ended by itself; `code` is negative for a signal."""

    command: Command
    code: int

    def __str__(self) -> str:
        return f"{self.command.name} {'was ended by' if self.code < 0 else 'ended with'} {explained(self.code)}"


class Processes:
    """The running processes of one launcher. Use as a context manager: leaving it stops them all."""

    def __init__(self, stop_grace_s: float, *, keep_open: Sequence[int] = (), elsewhere: Starter | None = None) -> None:
        """`keep_open` are file descriptors that processes on this host inherit; `elsewhere` starts commands that name a
        host, and is closed with this."""
        self._grace_s = stop_grace_s
        self._here = LocalStarter(keep_open)
        self._elsewhere = elsewhere
        self._running: dict[str, tuple[Command, Handle]] = {}
        self._others = set(psutil.Process().children(recursive=True))
        """Children of this process from before; they are not stopped."""
        adopt_orphans()

    def start(self, command: Command) -> None:
        """Starts a process on its host. Raises OSError when that fails, ValueError when nothing starts processes on
        other hosts."""
        starter = self._elsewhere if command.host else self._here
        if starter is None:
            raise ValueError(f"{command.name} is to run on {command.host}, where nothing starts it")
        self._running[command.name] = (command, starter.start(command))

    def ended(self) -> list[Ended]:
        """Processes that have ended since the last call, in the order of their start."""
        polled = [(command, handle.poll()) for command, handle in self._running.values()]
        gone = [Ended(command, code) for command, code in polled if code is not None]
        for each in gone:
            del self._running[each.command.name]
        return gone

    def running(self) -> list[str]:
        """Names of the processes that have not ended."""
        return [name for name, (_, handle) in self._running.items() if handle.poll() is None]

    def hosts(self) -> dict[str, str]:
        """Process → the host that it is on, of those that are not on this one."""
        return {name: handle.address for name, (_, handle) in self._running.items() if handle.address}

    def wait(self, names: Sequence[str], timeout_s: float) -> None:
        """Gives the named processes up to `timeout_s` to end by themselves."""
        deadline = time.monotonic() + timeout_s
        while set(names).intersection(self.running()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def kill_orphans(self) -> None:
        """Kills orphans of processes that have ended, which this process has adopted."""
        own = {handle.pid for _, handle in self._running.values()}
        for orphan in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if orphan.pid not in own and orphan not in self._others and not is_tracker(orphan):
                    _kill([*orphan.children(recursive=True), orphan])

    def stop(self) -> list[str]:
        """Sends SIGTERM to each process, then SIGKILL to the processes and descendants that remain after the grace.

        Takes at most the grace, THERE_S more if some are on other hosts, and three times KILL_WAIT_S. Returns the names
        of the processes that did not stop within that time.
        """
        for _, handle in self._running.values():
            handle.stop()
        there = any(handle.address for _, handle in self._running.values())
        self.wait(list(self._running), self._grace_s + (THERE_S if there else 0.0))
        late = self.running()
        for _, handle in self._running.values():
            handle.kill()
        kill_all(lambda: [each for each in self._descendants() if not is_tracker(each)])
        psutil.wait_procs(self._descendants(), timeout=KILL_WAIT_S)  # trackers free shared memory and end
        kill_all(self._descendants)
        for _, handle in self._running.values():
            handle.poll()
        self._running.clear()
        if self._elsewhere is not None:
            self._elsewhere.close()
        return late

    def _descendants(self) -> list[psutil.Process]:
        """Those of this process that live, without what it had before."""
        return living_of(set(psutil.Process().children(recursive=True)) - self._others)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def leave(code: int) -> NoReturn:
    """Ends this process, whose work is all done, without the interpreter's shutdown.

    The shutdown would end threads that are still in native code, for example in a transport that connects to a new
    generator: C++ then aborts, and a run that is complete would look failed. It would also let native modules print
    pages about their own leaks, which bury the one line that tells why a process ended.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_with(main: Callable[[], int]) -> NoReturn:
    """As `leave`, with what `main` returns, or the code of the SystemExit with which a signal has ended it."""
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    leave(code)


def guard_group() -> None:
    """Starts a watchdog process that waits for the end of this one and then kills the rest of its process group: a
    killed generator can't end its engine, and the launcher, which could, may have been killed as well.

    Does nothing unless this process leads its group, as all do that a launcher starts. Must be called before any thread
    is started. The watchdog inherits open descriptors (such as the run lock) and holds them until the group is gone.
    """
    leader = os.getpid()
    if os.getpgrp() != leader or os.fork():
        return
    try:
        os.setsid()
        select.select([os.pidfd_open(leader)], [], [])
        _kill([process for process in psutil.process_iter() if _is_of(process, leader)])
    finally:
        os._exit(0)


def _is_of(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and not is_tracker(process)
    except ProcessLookupError:
        return False


def describe(processes: Iterable[psutil.Process]) -> str:
    """Their pids, command lines and states, for a message."""
    return ", ".join(map(_describe, processes)) or "a process of another user, container or machine"


def _describe(process: psutil.Process) -> str:
    try:
        program, *arguments = process.cmdline() or [process.name()]
        line = textwrap.shorten(" ".join([Path(program).name, *arguments]), 100, placeholder=" …")
        return f"pid {process.pid} ({line}; {process.status()})"
    except psutil.Error:  # it has ended, or may not be inspected
        return f"pid {process.pid}"


def living_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still exist and are not zombies."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def kill_all(living: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Kills the processes that `living` returns until it returns none, since killing a parent may reveal children that
    were not seen before. Returns those that remain after KILL_WAIT_S."""
    deadline = time.monotonic() + KILL_WAIT_S
    while (left := living()) and time.monotonic() < deadline:
        _kill(left)
    return left


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "can't adopt orphans (PR_SET_CHILD_SUBREAPER)")


def is_tracker(process: psutil.Process) -> bool:
    """Whether it is Python's own process that frees the shared memory of killed ones; it ends by itself after them."""
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:  # it has ended, or may not be inspected
        return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    psutil.wait_procs(processes, timeout=0.5)
