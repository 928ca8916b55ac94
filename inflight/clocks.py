"""How far the clocks of other hosts were off during a run: measured over the status sockets, written by the launcher,
applied where times of several hosts are compared (`inflight trace`)."""

from __future__ import annotations

import bisect
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from inflight.messages import ClockOffset
from inflight.metrics import JsonLines, read_lines

CLOCKS_FILE = "clocks.jsonl"
EVERY_S = 60.0
"""Seconds after which the offset of a process is written again: clocks drift."""


class ClockLog:
    """Appends a line for a process on another host when its offset is first known, once it is known with half the
    bound, and every minute."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = run_dir / CLOCKS_FILE
        self._clock = clock
        self._written: dict[str, tuple[float, ClockOffset]] = {}

    def note(self, offsets: Mapping[str, ClockOffset], hosts: Mapping[str, str]) -> None:
        """`offsets`: process → how far this host's clock is ahead of its host's; `hosts`: process → its host, for those
        that are not on this one. While the disk is full nothing is written, which costs only accuracy."""
        now = self._clock()
        for name in offsets.keys() & hosts.keys():
            if self._is_news(name, offsets[name], now):
                with contextlib.suppress(OSError), JsonLines(self._path) as file:
                    file.write(
                        {"time": now, "process": name, "host": hosts[name]} | msgspec.structs.asdict(offsets[name])
                    )
                    self._written[name] = (now, offsets[name])

    def _is_news(self, name: str, offset: ClockOffset, now: float) -> bool:
        if not math.isfinite(offset.ahead_s) or not math.isfinite(offset.round_trip_s):
            return False
        at, before = self._written.get(name, (-math.inf, None))
        return now - at >= EVERY_S or before is None or offset.round_trip_s < before.round_trip_s / 2


class _Measured(NamedTuple):
    time: float
    ahead_s: float
    round_trip_s: float


class Clocks:
    """The offsets that were written during a run."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ValueError for a damaged file. Without one all clocks are taken for the same."""
        self._of: dict[str, list[_Measured]] = {}
        for line in read_lines(run_dir / CLOCKS_FILE):
            try:
                found = _Measured(float(line["time"]), float(line["ahead_s"]), float(line["round_trip_s"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{run_dir / CLOCKS_FILE} is damaged: {error!r}") from None
            self._of.setdefault(str(line.get("process")), []).append(found)
        for lines in self._of.values():
            lines.sort()

    def aligned(self, process: str, moment: float) -> float:
        """A moment that a process has noted, on the clock of the launcher's host; Unix time in seconds."""
        measured = self._at(process, moment)
        return moment if measured is None else moment + measured.ahead_s

    def notes(self) -> list[str]:
        """A line for each process whose times are moved, with the bound of the error."""
        return [
            f"times of {name} are moved by {found[-1].ahead_s:+.6f} s at the end, to within "
            f"{max(each.round_trip_s for each in found) / 2:.6f} s: its host has a clock of its own"
            for name, found in sorted(self._of.items())
        ]

    def _at(self, process: str, moment: float) -> _Measured | None:
        """What was measured last before a moment, or else first."""
        found = self._of.get(process)
        if not found:
            return None
        times = [each.time - each.ahead_s for each in found]  # as the process itself notes them
        return found[max(bisect.bisect_right(times, moment) - 1, 0)]
