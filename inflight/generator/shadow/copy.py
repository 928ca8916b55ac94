"""The CUDA shadow that becomes live by a copy in stream order, from device memory (`copy`) or the host's (`host`)."""

from __future__ import annotations

import time

import torch

from inflight.generator.shadow.base import CudaShadow
from inflight.generator.shadow.cuda_plan import LoadWeights
from inflight.generator.shadow.layout import Layout


class CopyShadow(CudaShadow):
    """A second buffer, on the device or in pinned host memory, copied over the live one in stream order."""

    def __init__(
        self, live: torch.Tensor, layout: Layout, load_weights: LoadWeights, *, whole: bool, host: bool
    ) -> None:
        super().__init__(live, layout, load_weights, whole=whole)
        self.name = "host" if host else "copy"
        self._second = torch.empty(live.numel(), dtype=torch.uint8, pin_memory=True) if host else torch.empty_like(live)
        self._second.copy_(live)

    def target(self) -> torch.Tensor:
        return self._second

    def swap(self) -> float:
        """Returns the seconds that queueing took: the device copies between two steps; the step loop does not wait."""
        started = time.perf_counter()
        self.live.copy_(self._second, non_blocking=True)
        self._swapped.record(torch.cuda.current_stream(self.device))
        return time.perf_counter() - started
