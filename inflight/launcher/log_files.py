"""Bounds the logs of a run's processes on disk: one that has reached its size begins anew, and one older file is kept.

A process and its children append to the log through a descriptor that they have inherited, without the launcher. They
keep that file whatever its name is, so it can't be replaced, only emptied: what it holds is copied first. No process
waits for that, and what one prints in the instant between the two is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path
from typing import BinaryIO, Self

LOOK_S = 1.0
"""Seconds between two looks at the logs; a log exceeds its size by what is printed meanwhile."""
AT_ONCE = 1 << 20
"""Bytes that are copied in one go."""
CLOSES_WITHIN_S = 10.0


def older_of(log: Path) -> Path:
    """The file that has what a log held before it began anew."""
    return log.with_name(f"{log.name}.1")


class BoundedLogs:
    """As a context: a thread bounds all logs in a folder, also while the launcher's own thread is blocked."""

    def __init__(self, folder: Path, mib: float) -> None:
        """`mib`: MiB of a log with which it begins anew."""
        self._folder = folder
        self._size = int(mib * (1 << 20))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(CLOSES_WITHIN_S)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Has each log that has reached its size begin anew."""
        for log in self._folder.glob("*.log"):
            with contextlib.suppress(OSError):  # one that can't be read is no reason to leave the others
                if log.stat().st_size >= self._size:
                    self._begin_anew(log)

    def _begin_anew(self, log: Path) -> None:
        """Without room for a copy, the older file goes, which may make room, and the log stays as it is until it has
        twice its size."""
        with log.open("r+b") as file:
            if self._copied(file, log) or os.fstat(file.fileno()).st_size >= 2 * self._size:
                file.truncate(0)

    def _copied(self, file: BinaryIO, log: Path) -> bool:
        older = older_of(log)
        try:
            if shutil.disk_usage(log.parent).free >= self._size:  # else a checkpoint may need what there is
                file.seek(max(0, os.fstat(file.fileno()).st_size - self._size))
                with older.open("wb") as copy:
                    left = 2 * self._size  # a process that prints as fast as this copies does not keep it here
                    while left > 0 and (more := file.read(AT_ONCE)):
                        left -= copy.write(more)
                return True
        except OSError:
            pass
        with contextlib.suppress(OSError):
            older.unlink()  # it would not be what the log held before
        return False
