"""What a run has written so far about its steps, swaps and evaluations, read as the files grow."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, counts_of

READ_AT_ONCE = 1 << 22
"""Most bytes of a file that one call reads, so that the view of a long run appears at once and fills up."""
KEPT = 4000
"""Most steps, swaps and evaluations that are kept: more than a screen shows."""
FIGURES = (
    "step",
    "time_s",
    "reward",
    "reward_all",
    "loss",
    "lag_mean",
    "lag_max",
    "tokens_per_s",
    "wait_s",
    "train_s",
    "lag_0",
)
"""What is kept of a step's line, which may also name every question and hold figures for 64 lags; and COUNTS."""
COUNTS = frozenset(
    {"groups_dropped", "rollouts_dropped", "groups_failed", "tokens_masked_by_rule", "tokens_masked_by_ratio"}
)
"""Figures that count by reason."""


class Tail:
    """The new lines of a file of JSON lines at each call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def lines(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file has become shorter, as when a run is resumed: then these are its lines from the beginning;
        and the complete lines that were not read before. A file that is not there, or can't be read, has none; a
        damaged line is left out."""
        try:
            with self._path.open("rb") as file:
                shorter = file.seek(0, 2) < self._read
                self._read = 0 if shorter else self._read
                file.seek(self._read)
                found = file.read(READ_AT_ONCE)
        except OSError:
            return False, []
        whole = found[: found.rfind(b"\n") + 1]
        self._read += len(whole)
        return shorter, [line for text in whole.splitlines() if (line := _object(text))]


class RecentLines:
    """The last steps, swaps and evaluations of a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._tails = {name: Tail(run_dir / name) for name in (METRICS_FILE, SWAPS_FILE, EVAL_FILE)}
        self.steps: deque[dict[str, Any]] = deque(maxlen=KEPT)
        """Of each step, FIGURES and COUNTS; counts that are damaged are left out."""
        self.swaps: deque[dict[str, Any]] = deque(maxlen=KEPT)
        """Versions that became live."""
        self.evaluations: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def refresh(self) -> None:
        """Reads what was written since the last call."""
        self._take(METRICS_FILE, self.steps, _step)
        self._take(SWAPS_FILE, self.swaps, _swap)
        self._take(EVAL_FILE, self.evaluations, dict)

    def _take(self, name: str, rows: deque[dict[str, Any]], kept: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        shorter, lines = self._tails[name].lines()
        if shorter:
            rows.clear()
        rows.extend(row for line in lines if (row := kept(line)))

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest step; empty before the first one."""
        return self.steps[-1] if self.steps else {}


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _step(line: dict[str, Any]) -> dict[str, Any]:
    kept = {name: line[name] for name in FIGURES if name in line}
    for name in line.keys() & COUNTS:
        with contextlib.suppress(ValueError):
            kept[name] = counts_of(line, name)
    return kept


def _swap(line: dict[str, Any]) -> dict[str, Any]:
    return line if line.get("event") == "committed" else {}
