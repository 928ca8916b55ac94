"""Rows of files read one after the other, for data that are not to be stored a second time as a table.

Recent rows stay in memory (a lost question is re-queued); an earlier row is read again from the beginning of the files,
which takes as long as it took to get there.
"""

from __future__ import annotations

import codecs
import glob
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.config import ConfigError
from inflight.error_line import with_kind
from inflight.tasks.data.rows import LINE_COLUMN, LINES, BadRow, own_fields, parse, quiet
from inflight.tasks.data.tables import readable_as_one

KEPT = 4096
"""Rows that are kept in memory: more than are in flight at a time."""
AHEAD = 64
"""Rows that are read ahead of the one that is asked for, so that one look at all files, some 3 µs each, is for many
rows: with thousands of files it takes longer than a row."""
NOT_UTF8 = "inflight_not_utf8"
"""Puts a NUL in the place of bytes that are not UTF-8: no JSON has one, so that such a line costs itself alone."""
codecs.register_error(NOT_UTF8, lambda error: ("\0", error.end) if isinstance(error, UnicodeDecodeError) else ("", 0))


class Unreadable(BadRow):
    """The files can't be read up to a row, or have changed since their first row was read."""


class StreamRows:
    """Rows in the order of their files."""

    def __init__(self, files: Sequence[Path], option: str) -> None:
        """Reads the first row. Raises ConfigError when that can't be read, there is none, or the columns of parquet
        files differ."""
        self._are_lines = files[0].suffix.lower() in LINES
        self._files = files if self._are_lines else readable_as_one(files, option)
        self._option = option
        self._left: Iterator[Any] | None = None
        """None: the files are to be read from their beginning."""
        self._next = 0
        """Number of the row that is read next."""
        self._stood: list[tuple[int, int, int]] = []
        """Inode, bytes and time of the last change of each file when its first row was read."""
        self._length: int | None = None
        self._kept: OrderedDict[int, Any] = OrderedDict()
        try:
            self._raw(0)
        except IndexError:
            raise ConfigError(f"{option}={str(files[0])!r} is empty: it has no row") from None
        except Unreadable as error:
            raise ConfigError(f"{option}: {error}") from None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a stream's length is known when its end was read")
        return self._length

    def row(self, index: int) -> Mapping[str, Any]:
        """As Rows.row."""
        raw = self._raw(index)
        if not self._are_lines:
            return own_fields(raw)
        return parse(raw[LINE_COLUMN], self.place(index), self._files[0] if len(self._files) == 1 else None)

    def place(self, index: int) -> str:
        """The row, counted over all files."""
        what = str(self._files[0]) if len(self._files) == 1 else f"{self._option} ({len(self._files)} files)"
        return f"{what}, {'line' if self._are_lines else 'row'} {index + 1}"

    def _raw(self, index: int) -> Any:
        if index < 0 or (self._length is not None and index >= self._length):
            raise IndexError(index)
        if index in self._kept:
            return self._kept[index]
        try:
            if self._left is None or index < self._next:
                self._left = self._begin()
            while self._next <= index and self._read(self._left):
                pass
            self._read_ahead(self._left)
            self._require_unchanged()  # no row is given out before: all that were read are of the same files
        except Exception as error:  # noqa: BLE001 - of many libraries
            self._left = None  # an iterator that has raised is at its end, which is not that of the files
            self._kept.clear()
            read = error if isinstance(error, Unreadable) else with_kind(error)
            raise Unreadable(f"{self.place(min(index, self._next))} and what follows can't be read: {read}") from None
        if index not in self._kept:
            raise IndexError(index)
        return self._kept[index]

    def _begin(self) -> Iterator[Any]:
        """The rows from the first one on. Raises Unreadable, or what the library does."""
        self._require_unchanged()
        datasets = quiet()
        names = [glob.escape(str(file)) for file in self._files]  # the library takes each for a pattern
        if self._are_lines:
            features = datasets.Features({LINE_COLUMN: datasets.Value("string")})
            stream = datasets.load_dataset(
                "text",
                data_files=names,
                split="train",
                streaming=True,
                features=features,
                encoding="utf-8-sig",
                encoding_errors=NOT_UTF8,
            )
        else:
            stream = datasets.load_dataset("parquet", data_files=names, split="train", streaming=True)
        self._next = 0
        self._kept.clear()
        return iter(stream)

    def _require_unchanged(self) -> None:
        """Raises Unreadable when a file is not the one that reading began with, OSError when one is gone."""
        stand = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in map(Path.stat, self._files)]
        if self._stood and stand != self._stood:
            raise Unreadable("the files have changed since the run began to read them")
        self._stood = stand

    def _read_ahead(self, left: Iterator[Any]) -> None:
        """Reads rows that follow the one that is asked for. What fails there fails again for a question of its own."""
        try:
            for _ in range(AHEAD):
                if not self._read(left):
                    return
        except Exception:  # noqa: BLE001 - of many libraries
            self._left = None

    def _read(self, left: Iterator[Any]) -> bool:
        """Reads a row; False at the end. Raises Unreadable, or what the library does."""
        try:
            row = next(left)
        except StopIteration:
            self._require_unchanged()
            self._length = self._next
            return False
        self._kept[self._next] = row
        self._next += 1
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return True
