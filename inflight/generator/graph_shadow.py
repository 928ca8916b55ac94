"""The CUDA shadow that becomes live with its own CUDA graphs: see graph_sets.py."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from cuda.bindings import driver

from inflight.generator.cuda_plan import LoadWeights
from inflight.generator.graph_sets import GraphSets, capture_both
from inflight.generator.remap import CudaShadow, Layout
from inflight.weights.shadow import TornWeights
from inflight.weights.transport import cuda

logger = logging.getLogger("vllm.inflight")

GIB = 2**30
GRAPHS_BYTES = GIB
"""Kept for the second set's CUDA graphs where vLLM does not tell what one set's take."""


class GraphSetsShadow(CudaShadow):
    """The set whose graphs are not in use. Needs twice the weights on the device, as `copy` does."""

    def __init__(self, live: torch.Tensor, layout: Layout, load_weights: LoadWeights, *, whole: bool) -> None:
        super().__init__(live, layout, load_weights, whole=whole)
        self._sets = GraphSets(layout, (live, live.clone()))
        self._last_use = torch.cuda.Event()
        self.peak_bytes = 0
        """What a step takes beside weights and KV cache at the most; known before graphs are captured."""

    def hook(self, runner: Any) -> None:
        """Has vLLM plan and capture for both sets: before it does either."""
        capture_both(runner, self._sets, self._captured, GRAPHS_BYTES)

    def target(self) -> torch.Tensor:
        return self._sets.sets[1 - self._sets.current]

    def swap(self) -> float:
        """Seconds that the step loop took for it; the device goes on meanwhile."""
        started = time.perf_counter()
        # All that reads the old set is queued by now, on the stream of this thread, which launches every step.
        self._last_use.record(torch.cuda.current_stream(self.device))
        self._sets.use(1 - self._sets.current)
        self.live = self._sets.sets[self._sets.current]
        return time.perf_counter() - started

    def settle(self) -> None:
        """Waits for the last step that reads what is `target` now."""
        try:
            self._last_use.synchronize()
        except RuntimeError as error:
            raise TornWeights(f"the step before the swap failed: {error}") from error

    def _captured(self, first: int, second: int) -> None:
        self._upload()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        logger.info(
            "inflight: %d CUDA graphs for each set of weights, %.2f GiB for the first and %.2f GiB for the second, "
            "%.2f GiB are left", len(self._sets.graphs(1)), first / GIB, second / GIB, free / GIB,
        )  # fmt: skip
        if free < self.peak_bytes:
            raise ValueError(
                f"generator.swap=graphs: the CUDA graphs of both sets took {(first + second) / GIB:.2f} GiB and leave "
                f"{free / GIB:.2f} GiB, a step takes up to {self.peak_bytes / GIB:.2f} GiB: use remap, a lower "
                "gpu_memory_utilization or fewer cudagraph_capture_sizes"
            )

    def _upload(self) -> None:
        """Puts all graphs on the device now. Each would be at its first replay, the second set's after a swap."""
        stream = torch.cuda.current_stream(self.device)
        try:
            for graph in (*self._sets.graphs(0), *self._sets.graphs(1)):
                cuda.check("cuGraphUpload", driver.cuGraphUpload(graph.raw_cuda_graph_exec(), stream.cuda_stream))
        except cuda.CudaError as error:
            logger.warning("inflight: the first steps after the first swap will be slower: %s", error)
        stream.synchronize()
