"""The CUDA worker with other ways to swap beside its own, and figures of each remap: for comparisons by benches.

| way   | of               | what it does                                                       |
| calls | remap            | unmap, map and set access in several calls of Python, not in one   |
| idle  | remap            | waits for all that the device has to do, not for the last use      |
| copy  | remap and graphs | copies the other set over the live one, in stream order            |
"""

from __future__ import annotations

import time
from typing import Any

import torch

from inflight.generator.shadow.graphs import GraphSetsShadow
from inflight.generator.shadow.oneshot import Moved
from inflight.generator.shadow.remap import RemapShadow
from inflight.generator.worker.cuda import InflightCUDAWorker


class _Compared:
    """A shadow in an arena that can be asked to swap in another way."""

    ways: tuple[str, ...]
    way: str | None = None
    """None: its own."""

    def swap_by(self, way: str | None) -> None:
        """From the next swap on. Raises ValueError for a way that it does not have."""
        if way not in (None, self.name, *self.ways):  # type: ignore[attr-defined]
            raise ValueError(f"this shadow swaps by {self.name}, {', '.join(self.ways)}, not by {way!r}")  # type: ignore[attr-defined]
        self.settle()  # type: ignore[attr-defined]
        self.way = way

    def _copied(self: Any) -> float:
        started = time.perf_counter()
        self.live.copy_(self.target(), non_blocking=True)
        self._swapped.record(torch.cuda.current_stream(self.device))
        return time.perf_counter() - started


class ComparedRemap(_Compared, RemapShadow):
    """Keeps what each remap took."""

    ways = ("calls", "idle", "copy")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.swaps: list[Moved] = []

    def swap(self) -> float:
        return self._copied() if self.way == "copy" else super().swap()

    def _remap(self, behind: torch.cuda.Event | None = None) -> None:
        moved = self._arena.remap(behind=None if self.way == "idle" else behind, in_one=self.way != "calls")
        self._armed = False
        self.last_gap_s = moved.move
        self.swaps.append(moved)


class ComparedGraphs(_Compared, GraphSetsShadow):
    """Can copy as well."""

    ways = ("copy",)
    fallback = ComparedRemap

    def swap(self) -> float:
        return self._copied() if self.way == "copy" else super().swap()


class ComparedWorker(InflightCUDAWorker):
    """See the module's text."""

    graphs_shadow = ComparedGraphs
    remap_shadow = ComparedRemap

    def swap_by(self, way: str | None) -> None:
        """RPC: how swaps are done from now on; None: as configured. Raises ValueError for a way that there is not."""
        if isinstance(self.inflight_shadow, _Compared):
            self.inflight_shadow.swap_by(way)
        elif way not in (None, self.inflight_shadow.name):
            raise ValueError(f"swaps by {self.inflight_shadow.name} can't be done by {way!r}")

    def take_swaps(self) -> list[tuple[float, float, float, float]]:
        """RPC: what oneshot.Moved holds, for each remap since the last call."""
        swaps = getattr(self.inflight_shadow, "swaps", [])
        taken = [tuple(swap) for swap in swaps]
        swaps.clear()
        return taken
