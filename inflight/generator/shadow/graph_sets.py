"""Two sets of weights at separate addresses, each with CUDA graphs of its own: a swap moves no memory at all.

A swap points the parameters at the other set and has later steps replay the graphs that were captured over it. The step
in flight finishes with its own graph, so the device never stalls, and nothing waits for that step except the thread
that fills the set that is no longer live. The cost is a second capture when the worker starts, and its memory.

What is not in a graph (prefill, logits, batches of a size without one) reads the parameters' addresses when it is
launched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from inflight.generator.shadow.layout import Layout

Holder = tuple[Any, str]
"""An object of vLLM's, and the attribute that holds its captured graphs: a dictionary by shape."""


class NoSecondGraphs(ValueError):
    """The second set can't have graphs of its own; the text says why."""


def graph_holders(runner: Any, captured: int) -> list[Holder]:
    """Where vLLM keeps its graphs: pieces and V1's full graphs in the wrappers, V2's full graphs in its manager.

    Raises NoSecondGraphs for kinds that are unknown here, and when the graphs found are not as many as vLLM `captured`.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    if len(BreakableCUDAGraphWrapper._all_instances) > 0:
        raise NoSecondGraphs("vLLM's breakable CUDA graphs can't be captured twice")
    if runner.parallel_config.use_ubatching:
        raise NoSecondGraphs("the CUDA graphs of dual batch overlap can't be captured twice")
    holders: list[Holder] = [(wrapper, "concrete_cudagraph_entries") for wrapper in CUDAGraphWrapper._all_instances]
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        holders.append((manager, "graphs"))
    found = sum(len(getattr(holder, name)) for holder, name in holders)
    if found != captured:
        raise NoSecondGraphs(f"vLLM captured {captured} CUDA graphs, {found} of them were found")
    return holders


def graphs_in(entries: dict[Any, Any]) -> list[Any]:
    """The graphs themselves: a wrapper keeps each in an entry, the manager keeps them directly."""
    return [getattr(entry, "cudagraph", entry) for entry in entries.values()]


class GraphSets:
    """The parameters and captured graphs of two sets of weights, and which set is in use."""

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

    @property
    def complete(self) -> bool:
        """Whether both sets have their graphs."""
        return bool(self._graphs)

    def capture_second(self, holders: list[Holder], capture: Callable[[], int]) -> int:
        """Stores the graphs of the first set, has `capture` make those of the second, and returns to the first.

        Returns what `capture` does: the bytes that the graphs took. Raises RuntimeError when a graph of the first set
        has no counterpart in the second, or when memory runs out: a partial set of graphs can't be used.
        """
        first = [getattr(holder, name) for holder, name in holders]
        self.use(1)
        for holder, name in holders:
            setattr(holder, name, {})
        taken = capture()
        second = [getattr(holder, name) for holder, name in holders]
        if any(one.keys() != other.keys() for one, other in zip(first, second, strict=True)):
            raise RuntimeError("vLLM captured other shapes for the second set of weights: use generator.swap=remap")
        self._graphs = [first, second]
        self._holders = holders
        self.use(0)
        return taken

    def forget_second(self) -> None:
        """Frees the graphs of the second set, which must not be in use."""
        self._graphs = []
        self._holders = []

    def graphs(self, number: int) -> list[Any]:
        """The captured graphs of set `number`."""
        return [graph for entries in self._graphs[number] for graph in graphs_in(entries)]

    def use(self, number: int) -> None:
        """Makes later launches read set `number`: 0 or 1. When it raises, the set in use is unchanged."""
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

    def check_alone(self) -> None:
        """Raises NoSecondGraphs when a tensor that is no parameter lies in the first set, which is in use: its owner
        would keep reading this set after a swap.

        Searches Python objects only. Must be called before vLLM freezes its objects, which it does at the end of its
        start: frozen ones are skipped. Garbage is ignored.
        """
        frozen = gc.get_freeze_count() > 0
        gc.unfreeze()
        gc.collect()
        self.use(1)
        try:
            self._check_left()
        finally:
            self.use(0)
            if frozen:
                gc.freeze()

    def _check_left(self) -> None:
        ours = {id(one) for one in (*self.sets, *self._views[0], *(view._base for view in self._views[0]))}
        start = self.sets[0].data_ptr()
        stop = start + self.sets[0].numel()
        left = [
            f"{tuple(one.shape)} {one.dtype}"
            for one in gc.get_objects()
            if issubclass(type(one), torch.Tensor)
            and type(one).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # fake tensors have no address
            and one.device == self.sets[0].device
            and one.layout == torch.strided
            and start <= one.data_ptr() < stop
            and id(one) not in ours
        ]
        if left:
            raise NoSecondGraphs(
                f"{len(left)} tensors beside the parameters lie in the weights, the first {left[0]}: they would keep "
                "their old values after a swap"
            )
