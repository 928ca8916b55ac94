"""A run's metrics as JSON lines: one object a line, appended whole, read back even when the last line is torn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
"""A line a step."""
SWAPS_FILE = "swaps.jsonl"
"""A line for each version and generator."""


class JsonLines:
    """Appends objects to a file, a line each, so that a reader or a crash never meets half a line but the last."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one line, or raises OSError and leaves none: a disk that is full now may have room for the next.

        Numbers that JSON has no word for become null: a NaN loss must not end the log of it.
        """
        line = (json.dumps(_finite(values), allow_nan=False, separators=(", ", ": ")) + "\n").encode()
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(self._file.tell() - written)
            raise OSError(f"{self._file.name}: only {written} of {len(line)} bytes could be written")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines; [] when there is no file. Raises ValueError naming the line when one is damaged."""
    if not path.is_file():
        return []
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):  # what follows was never finished
        try:
            objects.append(_object(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from None
    return objects


def _object(line: bytes) -> dict[str, Any]:
    found = json.loads(line.decode())
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__}, not an object")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
