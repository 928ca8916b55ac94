"""Who holds the lock of a run folder, and the end of those who have it from a launcher that is gone."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

import psutil

from inflight.processes import is_tracker, kill_all, living_of


def sign(lock: int) -> None:
    """Marks the flock on this open file as this launcher's own, by its number as the position in the file. Who inherits
    an open file shares the position, which can be seen from outside; who takes the lock in another way has its own."""
    os.lseek(lock, os.getpid(), os.SEEK_SET)


def holders(lock: int) -> dict[psutil.Process, int]:
    """The other processes that hold the flock on this open file, not those that merely have it open, and the number of
    the launcher that signed it, or 0. What another user, container or machine runs is not seen."""
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return {process: signed for process in others if (signed := _signed(process.pid, lock)) is not None}


def _signed(pid: int, lock: int) -> int | None:
    """Who signed the lock that this process holds; None when it does not hold it."""
    name, sought = Path(os.readlink(f"/proc/self/fd/{lock}")).name, os.fstat(lock)
    for file in glob.glob(f"/proc/{pid}/fd/*"):  # none of a process that is gone, or another user's
        with contextlib.suppress(OSError):  # closed meanwhile
            if Path(os.readlink(file)).name == name:
                told = Path(file.replace("/fd/", "/fdinfo/")).read_text()
                # What the kernel tells first: a look at a file whose server is gone might never return.
                if "FLOCK" in told and os.path.samestat(os.stat(file), sought):
                    return int(told.split()[1])  # pos: 4711
    return None


def left_behind(lock: int) -> list[psutil.Process]:
    """Of the holders those that have the lock from a launcher that is gone."""
    held = holders(lock)
    numbers = {process.pid for process in held}
    return [process for process, signed in held.items() if signed and signed not in numbers]


def kill_left_behind(lock: int) -> list[psutil.Process]:
    """SIGKILL to who was left behind with the lock and to their descendants; those that live on KILL_WAIT_S later.
    Known by number and start: nobody is killed who has the number of one that is gone."""
    family: set[psutil.Process] = set()

    def living() -> list[psutil.Process]:
        for holder in left_behind(lock):
            with contextlib.suppress(psutil.NoSuchProcess):
                family.update([holder, *(each for each in holder.children(recursive=True) if not is_tracker(each))])
        return living_of(family)

    return kill_all(living)
