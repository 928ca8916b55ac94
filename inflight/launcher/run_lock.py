"""Finds the holders of a run folder's lock, and kills those that inherited it from a launcher that has died."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

import psutil

from inflight.processes import is_tracker, kill_all, living_of


def sign(lock: int) -> None:
    """Marks the flock on this open file as this launcher's, by storing its pid as the file position. Processes that
    inherit the open file share the position, which other processes can read; a lock taken anew has its own."""
    os.lseek(lock, os.getpid(), os.SEEK_SET)


def holders(lock: int) -> dict[psutil.Process, int]:
    """The other processes that hold the flock on this open file, not those that only have it open, each with the pid of
    the launcher that signed it, or 0. Processes of another user, container or machine are not visible."""
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return {process: signed for process in others if (signed := _signed(process.pid, lock)) is not None}


def _signed(pid: int, lock: int) -> int | None:
    """The pid that signed the lock held by this process; None when the process does not hold it."""
    name = Path(os.readlink(f"/proc/self/fd/{lock}")).name
    sought = os.fstat(lock)
    for file in glob.glob(f"/proc/{pid}/fd/*"):  # empty for a process that has ended or is another user's
        with contextlib.suppress(OSError):  # closed in the meantime
            if Path(os.readlink(file)).name == name:
                told = Path(file.replace("/fd/", "/fdinfo/")).read_text()
                # fdinfo first: a stat of a file whose server is unreachable might never return.
                if "FLOCK" in told and os.path.samestat(os.stat(file), sought):
                    return int(told.split()[1])  # pos: 4711
    return None


def orphaned(lock: int) -> list[psutil.Process]:
    """The holders that inherited the lock from a launcher that has died."""
    held = holders(lock)
    numbers = {process.pid for process in held}
    return [process for process, signed in held.items() if signed and signed not in numbers]


def kill_orphaned(lock: int) -> list[psutil.Process]:
    """Sends SIGKILL to the orphaned holders and their descendants. Returns those that still live after KILL_WAIT_S.
    Processes are identified by pid and start time, so a reused pid is never killed."""
    family: set[psutil.Process] = set()

    def living() -> list[psutil.Process]:
        for holder in orphaned(lock):
            with contextlib.suppress(psutil.NoSuchProcess):
                family.update([holder, *(each for each in holder.children(recursive=True) if not is_tracker(each))])
        return living_of(family)

    return kill_all(living)
