"""The CUDA shadow that is swapped together with CUDA graphs of its own: see graph_sets.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cuda.bindings import driver

from inflight.generator.shadow.arena import Arena
from inflight.generator.shadow.base import ArenaShadow, CudaShadow
from inflight.generator.shadow.cuda_plan import LoadWeights
from inflight.generator.shadow.graph_sets import GraphSets, Holder, NoSecondGraphs, graph_holders
from inflight.generator.shadow.layout import Layout
from inflight.generator.shadow.remap import RemapShadow
from inflight.messages.base import reason_of
from inflight.weights.transport import cuda

logger = logging.getLogger("vllm.inflight")

GIB = 2**30
GRAPHS_BYTES = GIB
"""Reserved for the second set's CUDA graphs when vLLM does not report the size of one set's."""


class HalfCaptured(RuntimeError):
    """The second capture failed on this rank, in the middle of a collective operation of all ranks."""


class GraphSetsShadow(ArenaShadow):
    """The set whose addresses and graphs are not in use.

    The first set is the arena's live range, which is never remapped here. So if this class finds out while vLLM starts
    that the graphs can't be captured twice, the arena can still be swapped by remapping (`ready`).
    """

    name = "graphs"
    fallback: type[RemapShadow] = RemapShadow
    """The shadow used when vLLM's graphs can't be captured twice."""

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        load_weights: LoadWeights,
        *,
        whole: bool,
        any_rank: Callable[[bool], bool],
        required: bool,
    ) -> None:
        """`any_rank(bad)` tells whether any rank calls it with True: all ranks capture twice or none does. `required`:
        raise NoSecondGraphs when that is impossible, instead of using `fallback`."""
        super().__init__(arena, layout, load_weights, whole=whole)
        self._any_rank = any_rank
        self._required = required
        self._sets = GraphSets(layout, (arena.live, arena.shadow))
        self._tried = False
        self.peak_bytes = 0
        """Most memory of a step beside weights and KV cache, in bytes; set before graphs are captured."""

    def plan_graphs(self, runner: Any) -> None:
        """Makes vLLM's runner plan and capture for two sets instead of one.

        Memory planning is given twice the result of `profile_cudagraph_memory`: the second capture runs on another
        stream, which cannot reuse free blocks of the pool that both share. The V2 runner of vLLM 0.26 reports 0.
        """
        profile = runner.profile_cudagraph_memory
        capture = runner.capture_model
        runner.profile_cudagraph_memory = lambda: 2 * profile() or GRAPHS_BYTES
        self._capture_twice = partial(self._capture_both, runner)

        def captured(*, profile_only: bool = False) -> int:
            # From vLLM 0.32 on, planning also captures a few graphs, measures them and discards them.
            return capture(profile_only=True) if profile_only else self._capture_twice(capture)

        runner.capture_model = captured

    def measured(self, step_bytes: int) -> None:
        self.peak_bytes = step_bytes

    def ready(self, runner: Any) -> CudaShadow:
        """Returns this shadow, or one that remaps the same memory."""
        if not self._tried:
            self._capture_twice(lambda: 0)  # vLLM captures nothing, as with enforce_eager
        if self._sets.complete:
            return self
        return self.fallback(self._arena, self._layout, self._load_weights, whole=self._whole).ready(runner)

    def target(self) -> torch.Tensor:
        return self._sets.sets[1 - self._sets.current]

    def swap(self) -> float:
        """Returns the seconds for which the step loop stalled; the device does not stall."""
        started = time.perf_counter()
        # All work that reads the old set is queued by now on this thread's stream, which launches every step.
        self._swapped.record(torch.cuda.current_stream(self.device))
        self._sets.use(1 - self._sets.current)
        self.live = self._sets.sets[self._sets.current]
        return time.perf_counter() - started

    def _capture_both(self, runner: Any, capture: Callable[[], int]) -> int:
        from vllm.compilation.counter import compilation_counter

        self._tried = True
        captured = -compilation_counter.num_cudagraph_captured
        first = max(0, capture())  # measured by free memory: another process may have released some meanwhile
        captured += compilation_counter.num_cudagraph_captured
        holders: list[Holder] = []

        def can_be() -> None:
            holders.extend(graph_holders(runner, captured))
            self._sets.check_alone()
            self._check_room(first)

        if not self._all_pass(can_be):
            return first
        try:
            second = self._sets.capture_second(holders, capture)
        except Exception as error:
            raise HalfCaptured(
                f"the second set of CUDA graphs failed, use generator.swap=remap: {reason_of(error)}"
            ) from error
        if not self._all_pass(lambda: self._check_room(0)):
            self._sets.forget_second()
            return first
        self._upload()
        logger.info(
            "inflight: %d CUDA graphs for each set of weights, %.2f GiB for the first and %.2f GiB for the second",
            captured,
            first / GIB,
            second / GIB,
        )
        return first + second

    def _all_pass(self, check: Callable[[], None]) -> bool:
        """Whether `check` raises on no rank. Otherwise its error is logged or, when graphs are required, raised on all
        ranks."""
        why = ""
        try:
            check()
        except NoSecondGraphs as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - any error: the other ranks wait for this rank's result
            why = reason_of(error)
        if not self._any_rank(bool(why)):
            return True
        why = why or "another rank can't, see its log"
        if self._required:
            raise NoSecondGraphs(f"generator.swap=graphs: {why}; use remap")
        logger.warning("inflight: swap remap instead of graphs: %s", why)
        return False

    def _check_room(self, graphs: int) -> None:
        """Raises NoSecondGraphs when memory is too short for `graphs`, the bytes still to be captured, and then for a
        step. After the start memory needs do not grow. The second set's graphs take no more than the first's."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < graphs + self.peak_bytes:
            raise NoSecondGraphs(
                f"a second set of CUDA graphs takes up to {graphs / GIB:.2f} GiB more and a step up to "
                f"{self.peak_bytes / GIB:.2f} GiB, {free / GIB:.2f} GiB are free: use a smaller KV cache or fewer "
                "cudagraph_capture_sizes"
            )

    def _upload(self) -> None:
        """Uploads all graphs to the device now, which otherwise happens at first replay: for the second set's, after a
        swap."""
        stream = torch.cuda.current_stream(self.device)
        try:
            for graph in (*self._sets.graphs(0), *self._sets.graphs(1)):
                cuda.check("cuGraphUpload", driver.cuGraphUpload(graph.raw_cuda_graph_exec(), stream.cuda_stream))
        except cuda.CudaError as error:
            logger.warning("inflight: the first steps after the first swap will be slower: %s", error)
        stream.synchronize()
