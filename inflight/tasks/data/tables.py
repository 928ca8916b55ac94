"""Parquet files by their footers, before a row is read: whether they have rows, and the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.config import ConfigError
from inflight.error_line import with_kind
from inflight.tasks.data.rows import footer_of


def readable_as_one(files: Sequence[Path], option: str) -> list[Path]:
    """Those that have a row. A stream ends at a file that has none, or has other columns than the first one, and
    converts values to the types of the first one. Raises ConfigError for files whose columns differ, where one can't be
    read, or where none has a row."""
    types: dict[Path, Mapping[str, Any]] = {}
    for file in files:
        try:
            if (footer := footer_of(file)).num_rows:
                types[file] = _types(footer)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{option}={str(file)!r} can't be read: {with_kind(error)}") from None
    if not types:
        raise ConfigError(f"{option}={str(files[0])!r} is empty: it has no row")
    first = next(iter(types))
    for file, found in types.items():
        if why := _difference(types[first], found):
            raise ConfigError(f"{option}: the files do not have the same columns: {first} and {file}, {why}")
    return list(types)


def _types(footer: Any) -> Mapping[str, Any]:
    """Type of each column, as `datasets` has it. Raises ValueError for a type that it does not know."""
    from datasets import Features

    return dict(Features.from_arrow_schema(footer.schema.to_arrow_schema()))


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what the columns of another file differ from those of the first; empty for none. A column that is null in all
    rows has any type."""
    if differ := sorted(first.keys() ^ other.keys()):
        return f"column {differ[0]!r} is in one of them alone"
    for name, kind in first.items():
        if other[name] != kind and getattr(other[name], "dtype", "") != "null":
            return f"column {name!r} is {kind} and {other[name]}"
    return ""
