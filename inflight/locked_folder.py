"""A temporary folder that is removed with the process that made it, or by the next process that makes one there."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = "process.lock"
"""Locked for as long as the process of a folder lives."""


@contextlib.contextmanager
def locked_folder(parent: Path, prefix: str, process: str = "") -> Iterator[Path]:
    """A folder in `parent` for its owner alone, whose name begins with `prefix`; removed at the end. Its lock has
    `process`, by which `locks_of` finds it.

    A process that is killed can't remove its folder: those of this user's that have the same prefix and whose process
    does not live are removed here, where the file system has locks. Raises OSError.
    """
    _remove_abandoned(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        new = folder / f"{LOCK}.new"
        with os.fdopen(os.open(new, os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
            lock.write(process)
            lock.flush()
            with contextlib.suppress(OSError):  # not on every file system: what is killed leaves its folder there
                fcntl.flock(lock, fcntl.LOCK_EX)
                new.rename(folder / LOCK)  # under this name it is always locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for path in _own_locks(parent, prefix):
        with contextlib.suppress(OSError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
            shutil.rmtree(path.parent, ignore_errors=True)


def _own_locks(parent: Path, prefix: str) -> list[Path]:
    """The locks of this user's folders."""
    return [lock for lock in parent.glob(f"{glob.escape(prefix)}*/{LOCK}") if _is_own(lock.parent)]


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def locks_of(parent: Path, prefix: str, process: str) -> list[Path]:
    """The locks of this user's folders that say so of their process."""
    return [lock for lock in _own_locks(parent, prefix) if _says(lock) == process]


def _says(lock: Path) -> str | None:
    try:
        return lock.read_text(errors="replace")
    except OSError:
        return None


def is_held(lock: Path) -> bool:
    """Whether the process of a folder lives."""
    with contextlib.suppress(FileNotFoundError), lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
