"""Files replaced all together, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def replace_all(contents: dict[Path, bytes | None]) -> None:
    """Replaces files by new contents (None: removes them); on any failure restores those already replaced."""
    with _staged(contents) as new, _staged({file: content_of(file) for file in contents}) as old:
        done: list[Path] = []
        try:
            for file, staged in new.items():
                done.append(file)
                _put(staged, file)
        except BaseException:
            for file in done:
                _put(old[file], file)
            raise


@contextlib.contextmanager
def _staged(contents: dict[Path, bytes | None]) -> Iterator[dict[Path, Path | None]]:
    """Writes contents to temporary files beside their targets, so that only renames are left."""
    staged: dict[Path, Path | None] = {}
    try:
        for file, content in contents.items():
            staged[file] = None
            if content is not None:
                handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
                os.close(handle)
                temporary = staged[file] = Path(name)
                temporary.write_bytes(content)
                _take_over(file, temporary)
        yield staged
    finally:
        for left in staged.values():
            if left is not None:
                left.unlink(missing_ok=True)


def _take_over(file: Path, staged: Path) -> None:
    """Gives the new file the old one's mode and a later whole second, so that compiled code counts as outdated."""
    staged.chmod(0o644)
    if file.is_file():
        shutil.copymode(file, staged)
        later = max(time.time(), file.stat().st_mtime + 1)
        os.utime(staged, (later, later))


def _put(staged: Path | None, file: Path) -> None:
    os.replace(staged, file) if staged else file.unlink(missing_ok=True)


def content_of(file: Path) -> bytes | None:
    """None when there is no such file."""
    return file.read_bytes() if file.is_file() else None
