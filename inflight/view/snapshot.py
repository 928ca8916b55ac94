"""The latest values of a run's processes in a file, so that others than the launcher can show them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.types import Name, Value

LARGEST = 1 << 24
"""Bytes; a snapshot is some KiB."""
Values = Annotated[dict[Name, Value], Meta(max_length=4096)]


class StatusSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content."""

    time: float
    """Unix time, in seconds, at which it was written."""
    elapsed_s: float
    """Seconds since the launcher began."""
    processes: Annotated[dict[Name, Values], Meta(max_length=4096)]


def write(path: Path, elapsed_s: float, processes: Mapping[str, Mapping[str, Value]]) -> None:
    """Replaces the file. A disk that is full costs the snapshot, and nothing else."""
    snapshot = StatusSnapshot(
        time=time.time(), elapsed_s=elapsed_s, processes={k: dict(v) for k, v in processes.items()}
    )
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):
        partial.write_bytes(msgspec.json.encode(snapshot))
        partial.replace(path)


def read(path: Path) -> StatusSnapshot | None:
    """None when there is none. Raises ValueError for a file that is damaged or of another release."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError:
        return None
    if len(content) > LARGEST:
        raise ValueError(f"{path} is damaged: it has more than {LARGEST} bytes")
    try:
        return msgspec.json.decode(content, type=StatusSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or of another release: {error}") from None
