"""Two sets of weights at addresses of their own, each with CUDA graphs of its own: a swap moves no memory at all.

A swap points the parameters at the other set and has later steps replay the graphs that were captured over it. The
step in flight goes on with its own graph, so the device does not stand still, and nothing waits for it: only who wants
to fill the set that is no longer live does. The price is a second capture when the worker starts, and its memory.

What is not a graph (prefill, logits, sizes without a graph) takes the parameters' addresses when it is launched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from inflight.generator.remap import Layout

Holder = tuple[Any, str]
"""An object of vLLM's, and the attribute in which it keeps captured graphs: a dictionary by shape."""


class NoSecondGraphs(ValueError):
    """The second set can't have graphs of its own, or not all of them; the text says why."""


def graph_holders(runner: Any) -> list[Holder]:
    """Where vLLM keeps its captured graphs, after a capture. Raises NoSecondGraphs for kinds that are not known here.

    Pieces and V1's full graphs are in the wrappers, V2's full graphs in its manager.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    if len(BreakableCUDAGraphWrapper._all_instances) > 0:
        raise NoSecondGraphs("generator.swap=graphs: not for breakable CUDA graphs; use remap")
    if runner.parallel_config.use_ubatching:
        raise NoSecondGraphs("generator.swap=graphs: not for dual batch overlap; use remap")
    holders: list[Holder] = [(wrapper, "concrete_cudagraph_entries") for wrapper in CUDAGraphWrapper._all_instances]
    manager = getattr(runner, "cudagraph_manager", None)
    return [*holders, (manager, "graphs")] if manager is not None else holders


def graphs_in(entries: dict[Any, Any]) -> list[Any]:
    """The graphs themselves: a wrapper keeps each in an entry, the manager as it is."""
    return [getattr(entry, "cudagraph", entry) for entry in entries.values()]


class GraphSets:
    """Which of two sets the parameters and the captured graphs belong to."""

    def __init__(self, layout: Layout, sets: tuple[torch.Tensor, torch.Tensor]) -> None:
        """`sets`: uint8 `[nbytes]` each; the parameters lie in the first."""
        self.sets = sets
        self.current = 0
        self._parameters = [*layout.tensors, *(parameter for parameter, _ in layout.aliases)]
        numbers = [*range(len(layout.tensors)), *(number for _, number in layout.aliases)]
        regions = [layout.regions[number] for number in numbers]
        self._views = [
            [
                one[region.start : region.stop].view(parameter.dtype).view(parameter.shape)
                for region, parameter in zip(regions, self._parameters, strict=True)
            ]
            for one in sets
        ]
        self._holders: list[Holder] = []
        self._graphs: list[list[dict[Any, Any]]] = []

    def capture_second(self, holders: list[Holder], capture: Callable[[], int]) -> int:
        """Keeps the graphs of the first set, has `capture` make those of the second, and goes back to the first.

        Returns what `capture` does: bytes that the graphs took. Raises NoSecondGraphs when something would go on with
        the first set: a tensor that still lies in it, or a graph that the second has not got.
        """
        first = [getattr(holder, name) for holder, name in holders]
        self.use(1)
        self._check_moved()
        for holder, name in holders:
            setattr(holder, name, {})
        taken = capture()
        second = [getattr(holder, name) for holder, name in holders]
        if any(one.keys() != other.keys() for one, other in zip(first, second, strict=True)):
            raise NoSecondGraphs("generator.swap=graphs: vLLM captured other shapes for the second set; use remap")
        self._graphs, self._holders = [first, second], holders
        self.use(0)
        return taken

    def graphs(self, number: int) -> list[Any]:
        """The captured graphs of set `number`."""
        return [graph for entries in self._graphs[number] for graph in graphs_in(entries)] if self._graphs else []

    def use(self, number: int) -> None:
        """What is launched from now on reads set `number`: 0 or 1. When it raises, all of it is as it was."""
        try:
            self._point(number)
        except BaseException:
            self._point(self.current)
            raise
        self.current = number

    def _point(self, number: int) -> None:
        for parameter, view in zip(self._parameters, self._views[number], strict=True):
            parameter.data = view
        if self._graphs:
            for (holder, name), graphs in zip(self._holders, self._graphs[number], strict=True):
                setattr(holder, name, graphs)

    def _check_moved(self) -> None:
        """While the second set is in use, no tensor but ours lies in the first: who holds one would never change."""
        ours = {id(one) for one in (*self.sets, *self._views[0], *(view._base for view in self._views[0]))}
        start = self.sets[0].data_ptr()
        stop = start + self.sets[0].numel()
        left = [
            f"{tuple(one.shape)} {one.dtype}"
            for one in gc.get_objects()
            if type(one) in (torch.Tensor, torch.nn.Parameter)  # no stand-ins, which have no address
            and one.device == self.sets[0].device
            and one.layout == torch.strided
            and start <= one.data_ptr() < stop
            and id(one) not in ours
        ]
        if left:
            raise NoSecondGraphs(
                f"generator.swap=graphs: {len(left)} tensors beside the parameters lie in the weights, the first "
                f"{left[0]}: a swap would leave them behind; use remap"
            )


def capture_both(runner: Any, sets: GraphSets, done: Callable[[int, int], None], unknown_bytes: int) -> None:
    """Has vLLM's runner plan and capture for both sets wherever it does for one.

    Planning is told twice what `profile_cudagraph_memory` would tell: the second capture runs on another stream, which
    finds nothing free in the pool that both share. The V2 runner tells 0, and then it is `unknown_bytes`, for the
    second set. `done(first, second)` is called after both captures with the bytes that each took.
    Raises NoSecondGraphs, while capturing, when not every graph that vLLM counts is found.
    """
    from vllm.compilation.counter import compilation_counter

    profile, capture = runner.profile_cudagraph_memory, runner.capture_model

    def profile_both() -> int:
        return 2 * profile() or unknown_bytes

    def capture_twice() -> int:
        counted = compilation_counter.num_cudagraph_captured
        first = capture()
        counted = compilation_counter.num_cudagraph_captured - counted
        holders = graph_holders(runner)
        found = sum(len(getattr(holder, name)) for holder, name in holders)
        if found != counted:
            raise NoSecondGraphs(f"generator.swap=graphs: vLLM captured {counted} CUDA graphs, {found} are found")
        try:
            second = sets.capture_second(holders, capture)
        except torch.OutOfMemoryError as error:
            raise NoSecondGraphs(
                f"generator.swap=graphs: no memory for the second set's CUDA graphs; the first set's took "
                f"{first / 2**30:.2f} GiB: use remap, a smaller KV cache or fewer cudagraph_capture_sizes"
            ) from error
        done(first, second)
        return first + second

    runner.profile_cudagraph_memory, runner.capture_model = profile_both, capture_twice
