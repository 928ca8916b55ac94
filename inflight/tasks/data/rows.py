"""Rows of a data set by number, memory-mapped through `datasets`: lines of JSON, parquet files, or one of the hub.

Lines are stored as the text that they are and parsed when one is asked for. So each row keeps its own types and fields,
where a table would give all rows the same ones, and a line that is no JSON costs itself alone.
"""

from __future__ import annotations

import bisect
import glob
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from inflight.config import ConfigError
from inflight.error_line import with_kind
from inflight.tasks.data import fingerprint

LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet",)
LINE_COLUMN = "line"
FILE_BEGIN = 4096
"""Characters of a file's beginning in which its first one that is not blank is looked for."""


class BadRow(ValueError):
    """A row that no question can be made of; the text says which and why."""


class NotJson(BadRow):
    """A line that is no JSON object."""


class Rows(Protocol):
    """Numbered rows."""

    def __len__(self) -> int:
        """How many. Raises TypeError while that is not known."""

    def row(self, index: int) -> Mapping[str, Any]:
        """Values by column. Raises IndexError from the end on, BadRow for one that can't be read."""

    def place(self, index: int) -> str:
        """Where it stands, for messages."""


def matching(path: str, option: str) -> list[Path]:
    """The files that a path or a pattern such as `data/*.parquet` names, absolute, sorted by name; at least one.

    Raises ConfigError for none, or for files that are not of one of the known kinds, all the same.
    """
    named = os.path.expanduser(path)  # a file of that very name comes first: it may have brackets in it
    found = [named] if os.path.isfile(named) else sorted(glob.glob(named, recursive=True))
    files = [Path(each).absolute() for each in found]
    if not files:
        where = "" if os.path.isabs(named) else f" in {os.getcwd()}"
        raise ConfigError(f"{option}={path!r} does not exist: no file has that name{where}")
    allowed = f"a file, or a pattern for files, that ends in {', '.join((*LINES, *TABLES))}"
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1 or kinds & {None} or not all(file.is_file() for file in files):
        raise ConfigError(f"{option}={path!r} is not allowed: {allowed}")
    if chained := next((file for file in files if "::" in str(file)), None):
        raise ConfigError(f"{option}={str(chained)!r} is not allowed: :: joins file systems for datasets; rename it")
    return files


def is_of_files(path: str) -> bool:
    """Whether a path names files rather than a data set of the hub."""
    return _kind(Path(path)) is not None or "*" in path or os.path.exists(os.path.expanduser(path))


def _kind(file: Path) -> str | None:
    """How a file is read: `lines` or `table`; None for neither."""
    suffix = file.suffix.lower()
    return "lines" if suffix in LINES else "table" if suffix in TABLES else None


def open_files(files: Sequence[Path], option: str) -> Rows:
    """Rows of files, one file after the other. Raises ConfigError when one can't be read, or all are empty."""
    datasets = quiet()
    read = {file: table for file in files if (table := _read(file, option, len(files))) is not None}
    if not read:
        raise ConfigError(f"{option}={str(files[0])!r} is empty: it has no row")
    try:
        table = datasets.concatenate_datasets(list(read.values()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{option}: the files do not have the same columns: {with_kind(error)}") from None
    kind = LineRows if _kind(files[0]) == "lines" else TableRows
    return kind(table, Places(list(read), [len(each) for each in read.values()]))


def _read(file: Path, option: str, among: int) -> Any:
    """A file as a Dataset of `datasets`, from its cache where it has not changed since; None for one without a row,
    which the library does not read. Raises ConfigError."""
    datasets = quiet()
    try:
        if _is_empty(file):
            return None
        # The library's cache goes by path and time alone: another content under both would be taken for the old one.
        content = fingerprint.of_files([file], among=among).split()[-1]
        named = glob.escape(str(file))  # the library takes each name for a pattern
        if _kind(file) == "lines":
            features = datasets.Features({LINE_COLUMN: datasets.Value("string")})
            return datasets.load_dataset(
                "text", content, data_files=named, split="train", features=features, encoding="utf-8-sig"
            )
        return datasets.load_dataset("parquet", content, data_files=named, split="train")
    except Exception as error:  # noqa: BLE001 - of many libraries
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise ConfigError(f"{option}={str(file)!r}, line {_undecodable(file)}: it is not UTF-8") from None
        raise ConfigError(f"{option}={str(file)!r} can't be read: {with_kind(cause)}") from None


def _is_empty(file: Path) -> bool:
    """Raises what `footer_of` does."""
    if _kind(file) == "lines":
        return file.stat().st_size == 0
    return bool(footer_of(file).num_rows == 0)


def footer_of(file: Path) -> Any:
    """The FileMetaData of a parquet file. Raises ValueError for one with two columns of one name, or what pyarrow does
    for what is no parquet file: OSError or ValueError."""
    from pyarrow import parquet  # a part of `datasets`

    footer = parquet.read_metadata(file)
    name, count = Counter(footer.schema.to_arrow_schema().names).most_common(1)[0] if footer.num_columns else ("", 0)
    if count > 1:
        raise ValueError(f"it has {count} columns of the name {name!r}")
    return footer


def _undecodable(file: Path) -> int:
    """Number of the first line that is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0


class Places:
    """Which file and line a row is in."""

    def __init__(self, files: Sequence[Path], lengths: Sequence[int]) -> None:
        self._files = files
        self._ends = list(itertools.accumulate(lengths))

    def of(self, index: int) -> tuple[str, int]:
        """File and row in it, from 1."""
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return str(self._files[number]), index - before + 1


class LineRows:
    """Rows of a table of lines."""

    def __init__(self, lines: Any, places: Places) -> None:
        self._lines = lines
        self._places = places

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> Mapping[str, Any]:
        """The JSON object of a line."""
        line = within(self._lines, index)[LINE_COLUMN]
        return parse(line, self.place(index), Path(self._places.of(index)[0]))

    def place(self, index: int) -> str:
        """File and line."""
        return "{}, line {}".format(*self._places.of(index))


class TableRows:
    """Rows of a table with columns."""

    def __init__(self, table: Any, places: Places) -> None:
        self._table = table
        self._places = places

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Mapping[str, Any]:
        """A row without the fields that only other rows have."""
        return own_fields(within(self._table, index))

    def place(self, index: int) -> str:
        """File and row."""
        return "{}, row {}".format(*self._places.of(index))


def within(table: Any, index: int) -> Mapping[str, Any]:
    """A table's row; IndexError from its end on, and for what counts from the end."""
    if not 0 <= index < len(table):
        raise IndexError(index)
    return table[index]  # type: ignore[no-any-return]


def parse(line: str, place: str, file: Path | None = None) -> Mapping[str, Any]:
    """The object of a JSON line. Raises NotJson, which says so where the whole `file` is an array."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        why = "the line is empty" if not line.strip() else f"it is not JSON: {with_kind(error)}"
        raise NotJson(f"{place}: {why} ({_wanted(file)})") from None
    if not isinstance(row, dict):
        raise NotJson(f"{place}: it is {type(row).__name__}, not a JSON object ({_wanted(file)})")
    return row


def _wanted(file: Path | None) -> str:
    """What a line must be, for an error; if the file begins like an array, that it is one."""
    if file is None or not _begins_an_array(file):
        return "each line holds one JSON object"
    return "the file is an array, since it begins with [: each line must hold one JSON object"


def _begins_an_array(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as text:
            return text.read(FILE_BEGIN).lstrip().startswith("[")
    except OSError:
        return False


def own_fields(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A table gives all its rows the same nested fields, None where a row has none: those are left out again, so that
    a message has no `tool_calls` because another one has. Columns themselves stay."""
    return {name: _without_none(value) for name, value in row.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def quiet() -> Any:
    """The library `datasets`, without progress bars. Raises ConfigError where it is not installed."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("task.name='dataset' needs the library datasets: pip install 'inflight[data]'") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets
