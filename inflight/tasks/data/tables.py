"""Parquet files by their footers, before a row is read: whether they have rows, and the same columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.config import ConfigError


def is_empty(file: Path) -> bool:
    """Whether it has no row. Raises ValueError for a file with two columns of one name, or what pyarrow does for what
    is no parquet file: OSError or ValueError."""
    from pyarrow import parquet  # a part of `datasets`

    footer = parquet.read_metadata(file)
    name, count = Counter(footer.schema.to_arrow_schema().names).most_common(1)[0] if footer.num_columns else ("", 0)
    if count > 1:
        raise ValueError(f"it has {count} columns of the name {name!r}")
    return bool(footer.num_rows == 0)


def readable_as_one(files: Sequence[Path], option: str) -> list[Path]:
    """Those that have a row. A stream ends at a file that has none, or has other columns than the first one, and
    converts values to the types of the first one. Raises ConfigError for files whose columns differ, where one can't be
    read, or where none has a row."""
    types: dict[Path, Mapping[str, Any]] = {}
    for file in files:
        try:
            if not is_empty(file):
                types[file] = _types(file)
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())[:500]
            raise ConfigError(f"{option}={str(file)!r} can't be read: {type(error).__name__}: {why}") from None
    if not types:
        raise ConfigError(f"{option}={str(files[0])!r} is empty: it has no row")
    first = next(iter(types))
    for file, found in types.items():
        if why := _difference(types[first], found):
            raise ConfigError(f"{option}: the files do not have the same columns: {first} and {file}, {why}")
    return list(types)


def _types(file: Path) -> Mapping[str, Any]:
    """Type of each column, as `datasets` has it. Raises ValueError for a type that it does not know."""
    from datasets import Features
    from pyarrow import parquet

    return dict(Features.from_arrow_schema(parquet.read_schema(file)))


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what the columns of another file differ from those of the first; empty for none. A column that is null in all
    rows has any type."""
    if differ := sorted(first.keys() ^ other.keys()):
        return f"column {differ[0]!r} is in one of them alone"
    for name, kind in first.items():
        if other[name] != kind and getattr(other[name], "dtype", "") != "null":
            return f"column {name!r} is {kind} and {other[name]}"
    return ""
