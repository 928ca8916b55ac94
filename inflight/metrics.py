"""A run's metrics as JSON lines: one object per line, appended whole, readable even when the last line is torn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
"""One line per step."""
SWAPS_FILE = "swaps.jsonl"
"""One line per version and generator."""
EVAL_FILE = "eval.jsonl"
"""One line per evaluation."""
EVAL_GIVEN_UP = "eval/given_up"
"""Its value in a line says why an evaluation has no result."""
SUMMARY_FILE = "summary.json"
"""The result of the run, once it has ended."""


class JsonLines:
    """Appends objects to a file, one per line, so that after a crash only the last line can be incomplete."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one line, or raises OSError and writes nothing: a disk that is full now may have room for the next
        line.

        Numbers that JSON cannot represent become null: a NaN loss must not end the log.
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
    """All complete lines; [] when the file does not exist. Raises ValueError that names a damaged line."""
    if not path.is_file():
        return []
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):  # the rest is an unfinished line
        try:
            objects.append(_object(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from None
    return objects


def counts_of(line: Mapping[str, Any], figure: str) -> dict[str, int]:
    """A figure of a line that counts by reason, or by lag; {} where the line has none. Raises ValueError that names a
    figure that is damaged."""
    value = line.get(figure)
    if value is None:
        return {}
    if not isinstance(value, dict) or any(type(count) is not int for count in value.values()):
        raise ValueError(f"{figure} is {json.dumps(value)[:100]}, not an object of whole numbers")
    return value


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
