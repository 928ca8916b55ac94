"""Two sets with graphs of their own: a swap takes parameters and graphs together, and leaves nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation import cuda_graph
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.platforms import current_platform

from inflight.generator.cuda_plan import Region
from inflight.generator.graph_sets import GraphSets, NoSecondGraphs, capture_both, graphs_in

SIZES = (4, 2)


class Graph:
    """In place of a CUDA graph: goes on with the memory that the model's parameters had when it was captured."""

    model: Any = None
    replayed: Any = None

    def __init__(self) -> None:
        data = [self.model.weight.data, self.model.bias.data]
        # Addresses alone, as a graph has them: no tensor is kept.
        self.at = [(one.untyped_storage(), one.storage_offset(), one.shape) for one in data]

    def replay(self) -> None:
        Graph.replayed = [torch.empty(0).set_(storage, at, shape) for storage, at, shape in self.at]


def two_sets(model: torch.nn.Linear) -> GraphSets:
    """The model's parameters, and one that is tied, in the first of two sets; the second holds other values."""
    model.tied = torch.nn.Parameter(model.weight.data, requires_grad=False)
    regions = [Region("weight", 0, 24), Region("bias", 256, 264)]
    layout: Any = SimpleNamespace(
        regions=regions, tensors=[model.weight, model.bias], aliases=[(model.tied, 0)], nbytes=264
    )
    sets = GraphSets(layout, (torch.zeros(264, dtype=torch.uint8), torch.zeros(264, dtype=torch.uint8)))
    for number in (1, 0):
        sets.use(number)
        model.weight.fill_(number + 1.0)
        model.bias.fill_(10.0 * (number + 1))
    return sets


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2).requires_grad_(False)


class Runner:
    """What a runner has to do with graphs: vLLM's own wrapper around the model, captured for two sizes."""

    def __init__(self, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def capturing(graph: Graph, **_: Any) -> Iterator[None]:
            yield

        Graph.model = model
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capturing)
        monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
        monkeypatch.setattr(type(current_platform), "_global_graph_pool", (0, 0), raising=False)
        for wrapper in (cuda_graph.CUDAGraphWrapper, BreakableCUDAGraphWrapper):
            monkeypatch.setattr(wrapper, "_all_instances", weakref.WeakSet())
        self.config = VllmConfig()
        self.wrapper = cuda_graph.CUDAGraphWrapper(model, self.config, CUDAGraphMode.FULL)
        self.parallel_config = SimpleNamespace(use_ubatching=False)
        self.cudagraph_manager = SimpleNamespace(graphs={})
        self.estimate = 0

    def run(self, size: int) -> None:
        batch = BatchDescriptor(num_tokens=size)
        with set_forward_context(
            None, self.config, num_tokens=size, cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=batch
        ):
            self.wrapper(torch.ones(size, 3))

    def profile_cudagraph_memory(self) -> int:
        return self.estimate

    def capture_model(self) -> int:
        for size in SIZES:
            self.run(size)
            assert size not in self.cudagraph_manager.graphs, "vLLM refuses to capture a shape twice"
            self.cudagraph_manager.graphs[size] = Graph()
            compilation_counter.num_cudagraph_captured += 1
        return 100


@pytest.fixture
def runner(model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(model, monkeypatch)


def test_a_swap_changes_what_is_computed_and_what_vllms_wrapper_replays(model: torch.nn.Linear, runner: Runner) -> None:
    sets, took = two_sets(model), []
    capture_both(runner, sets, lambda *taken: took.append(taken), 7)
    assert runner.capture_model() == 200
    assert took == [(100, 100)]
    assert [len(sets.graphs(number)) for number in (0, 1)] == [4, 4]
    for number in (0, 1, 0, 1):
        sets.use(number)
        assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 2), 13.0 * (number + 1)))
        assert model.tied.data_ptr() == model.weight.data_ptr()
        for size in SIZES:
            for replay in (partial(runner.run, size), runner.cudagraph_manager.graphs[size].replay):
                replay()
                assert Graph.replayed[0].data_ptr() == model.weight.data_ptr()
                assert torch.equal(Graph.replayed[1], torch.full((2,), 10.0 * (number + 1)))
                Graph.replayed = None
    with torch.inference_mode():
        sets.use(0)
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 2), 13.0))


def test_memory_is_planned_for_both(model: torch.nn.Linear, runner: Runner) -> None:
    capture_both(runner, two_sets(model), lambda *_: None, 7)
    assert runner.profile_cudagraph_memory() == 7
    runner.estimate = 40
    assert runner.profile_cudagraph_memory() == 80


def _unseen(runner: Runner) -> None:
    compilation_counter.num_cudagraph_captured += 1


def _breakable(runner: Runner) -> None:
    runner.breakable = object.__new__(BreakableCUDAGraphWrapper)  # type: ignore[attr-defined]
    BreakableCUDAGraphWrapper._all_instances.add(runner.breakable)  # type: ignore[attr-defined]


def _overlap(runner: Runner) -> None:
    runner.parallel_config.use_ubatching = True


def _view(runner: Runner) -> None:
    runner.kept = Graph.model.weight.t()  # type: ignore[attr-defined]


def _other_shape(runner: Runner) -> None:
    if hasattr(runner, "once"):
        runner.cudagraph_manager.graphs.popitem()
    runner.once = True  # type: ignore[attr-defined]


def _out_of_memory(runner: Runner) -> None:
    if hasattr(runner, "once"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    runner.once = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (_unseen, "captured 5 CUDA graphs, 4 are found"),
        (_breakable, "breakable"),
        (_overlap, "dual batch overlap"),
        (_view, r"1 tensors beside the parameters .* \(3, 2\) torch.float32"),
        (_other_shape, "other shapes"),
        (_out_of_memory, "no memory for the second set's CUDA graphs"),
    ],
)
def test_what_a_swap_would_leave_behind_is_refused_at_the_start(
    model: torch.nn.Linear, runner: Runner, trouble: Callable[[Runner], None], told: str
) -> None:
    capture = runner.capture_model

    def troubled() -> int:
        taken = capture()
        trouble(runner)
        return taken

    runner.capture_model = troubled  # type: ignore[method-assign]
    capture_both(runner, two_sets(model), lambda *_: None, 7)
    with pytest.raises(NoSecondGraphs, match=told):
        runner.capture_model()


def test_a_swap_that_fails_half_way_leaves_all_as_it_was(model: torch.nn.Linear, runner: Runner) -> None:
    sets = two_sets(model)
    capture_both(runner, sets, lambda *_: None, 7)
    runner.capture_model()
    graphs = runner.wrapper.concrete_cudagraph_entries
    sets._views[1][1] = None  # type: ignore[call-overload] - the second parameter's
    with pytest.raises(TypeError):
        sets.use(1)
    assert sets.current == 0
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 2), 13.0))
    assert runner.wrapper.concrete_cudagraph_entries is graphs


@support_torch_compile(dynamic_arg_dims={"hidden": 0})
class Compiled(torch.nn.Module):
    """A model as vLLM compiles them."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) * 2


def test_what_vllm_compiled_takes_parameters_from_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, backend="eager", cudagraph_mode=CUDAGraphMode.NONE
    )
    config = VllmConfig(compilation_config=compilation)
    with set_current_vllm_config(config):
        compiled = Compiled(vllm_config=config)
        sets = two_sets(compiled.linear)
        for number in (0, 1, 0):
            sets.use(number)
            for size in SIZES:
                with torch.inference_mode(), set_forward_context(None, config, num_tokens=size):
                    assert torch.equal(compiled(torch.ones(size, 3)), torch.full((size, 2), 26.0 * (number + 1)))
    assert compiled.compiled


def test_graphs_are_found_in_entries_and_as_they_are() -> None:
    assert graphs_in({1: SimpleNamespace(cudagraph="piece"), 2: "full"}) == ["piece", "full"]
