"""Rows of files read one after the other, for data that are not to be stored a second time as a table.

Recent rows stay in memory (a lost question is re-queued); an earlier row is read again from the beginning of the files,
which takes as long as it took to get there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.config import ConfigError
from inflight.tasks.data.rows import LINE_COLUMN, LINES, one_line, own_fields, parse, quiet

KEPT = 4096
"""Rows that are kept in memory: more than are in flight at a time."""


class StreamRows:
    """Rows in the order of their files."""

    def __init__(self, files: Sequence[Path], option: str) -> None:
        """Reads the first row. Raises ConfigError when that can't be read, or there is none."""
        self._files = files
        self._option = option
        self._are_lines = files[0].suffix.lower() in LINES
        self._left: Iterator[Any] = iter(())
        self._next = 0
        """Number of the row that is read next."""
        self._length: int | None = None
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._begin()
        try:
            self._raw(0)
        except IndexError:
            raise ConfigError(f"{option}={str(files[0])!r} is empty: it has no row") from None
        except Exception as error:  # noqa: BLE001 - of many libraries
            raise ConfigError(f"{option}={str(files[0])!r} can't be read: {one_line(error)}") from None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a stream's length is known when its end was read")
        return self._length

    def row(self, index: int) -> Mapping[str, Any]:
        """As Rows.row. Raises what reading does."""
        raw = self._raw(index)
        return parse(raw[LINE_COLUMN], self.place(index)) if self._are_lines else own_fields(raw)

    def place(self, index: int) -> str:
        """The row, counted over all files."""
        what = str(self._files[0]) if len(self._files) == 1 else f"{self._option} ({len(self._files)} files)"
        return f"{what}, {'line' if self._are_lines else 'row'} {index + 1}"

    def _raw(self, index: int) -> Any:
        if index < 0 or (self._length is not None and index >= self._length):
            raise IndexError(index)
        if index in self._kept:
            return self._kept[index]
        if index < self._next:
            self._begin()
        while self._next <= index:
            self._read()
        return self._kept[index]

    def _begin(self) -> None:
        datasets = quiet()
        names = [str(file) for file in self._files]
        if self._are_lines:
            features = datasets.Features({LINE_COLUMN: datasets.Value("string")})
            stream = datasets.load_dataset(
                "text", data_files=names, split="train", streaming=True, features=features, encoding="utf-8-sig"
            )
        else:
            stream = datasets.load_dataset("parquet", data_files=names, split="train", streaming=True)
        self._left = iter(stream)
        self._next = 0
        self._kept.clear()

    def _read(self) -> None:
        """Raises IndexError at the end."""
        try:
            row = next(self._left)
        except StopIteration:
            self._length = self._next
            raise IndexError(self._next) from None
        self._kept[self._next] = row
        self._next += 1
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
