"""Two sets with graphs of their own: a swap takes parameters and graphs together, and all of both."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from inflight.generator.shadow.graph_sets import GraphSets, NoSecondGraphs, graph_holders, graphs_in
from tests.unit.graphs import SIZES, Graph, Runner, layout_of


def two_sets(model: torch.nn.Linear) -> GraphSets:
    """The model's parameters in the first of two sets; the second holds other values."""
    sets = GraphSets(layout_of(model), (torch.zeros(264, dtype=torch.uint8), torch.zeros(264, dtype=torch.uint8)))
    for number in (1, 0):
        sets.use(number)
        model.weight.fill_(number + 1.0)
        model.bias.fill_(10.0 * (number + 1))
    return sets


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2).requires_grad_(False)


@pytest.fixture
def runner(model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(model, monkeypatch)


def captured_twice(runner: Runner, sets: GraphSets) -> GraphSets:
    runner.capture_model()
    assert not sets.complete
    assert sets.capture_second(graph_holders(runner, 4), runner.capture_model) == 100
    assert sets.complete
    return sets


def test_a_swap_changes_what_is_computed_and_what_vllms_wrapper_replays(model: torch.nn.Linear, runner: Runner) -> None:
    sets = captured_twice(runner, two_sets(model))
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


def _breakable(runner: Runner) -> None:
    runner.breakable = object.__new__(BreakableCUDAGraphWrapper)  # type: ignore[attr-defined]
    BreakableCUDAGraphWrapper._all_instances.add(runner.breakable)  # type: ignore[attr-defined]


def _overlap(runner: Runner) -> None:
    runner.parallel_config.use_ubatching = True


def _unseen(runner: Runner) -> None:
    runner.cudagraph_manager.graphs.popitem()


def _more(runner: Runner) -> None:
    runner.cudagraph_manager.graphs["other"] = Graph()


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (_breakable, "breakable"),
        (_overlap, "dual batch overlap"),
        (_unseen, "captured 4 CUDA graphs, 3 of them"),
        (_more, "captured 4 CUDA graphs, 5 of them"),
    ],
)
def test_graphs_that_would_stay_with_the_first_set_are_refused(runner: Runner, trouble: Any, told: str) -> None:
    runner.capture_model()
    trouble(runner)
    with pytest.raises(NoSecondGraphs, match=told):
        graph_holders(runner, 4)


@pytest.mark.parametrize(("view", "shape"), [(torch.t, r"\(3, 2\)"), (lambda weight: weight[1, 2:], r"\(1,\)")])
def test_a_tensor_that_would_stay_with_the_first_set_is_refused(model: torch.nn.Linear, view: Any, shape: str) -> None:
    sets = two_sets(model)
    sets.check_alone()
    kept = view(model.weight)
    with pytest.raises(NoSecondGraphs, match=rf"1 tensors beside the parameters .* {shape} torch.float32"):
        sets.check_alone()
    assert kept.data_ptr() == view(model.weight).data_ptr(), "all is as it was"


class Weight(torch.nn.Parameter):
    """A parameter of another class, as vLLM's linear layers have them."""


def test_a_parameter_of_vllms_own_class_is_a_tensor_too(model: torch.nn.Linear) -> None:
    sets = two_sets(model)
    kept = Weight(model.weight.data, requires_grad=False)
    with pytest.raises(NoSecondGraphs, match="1 tensors beside"):
        sets.check_alone()
    del kept
    sets.check_alone()


def test_stand_ins_of_a_compiler_have_no_address_and_hold_nothing(model: torch.nn.Linear) -> None:
    sets = two_sets(model)
    with FakeTensorMode():
        fake = torch.empty(3)
    with FunctionalTensorMode():
        functional = torch.empty(3)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        functional.data_ptr()
    sets.check_alone()
    assert fake.shape == functional.shape


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_is_looked_at_and_stays_so(model: torch.nn.Linear, frozen: bool) -> None:
    sets = two_sets(model)
    kept = model.weight.t()
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        with pytest.raises(NoSecondGraphs, match="1 tensors beside"):
            sets.check_alone()
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()
    del kept


def test_garbage_holds_no_set(model: torch.nn.Linear) -> None:
    sets = two_sets(model)
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [model.weight.t()]
        cycle.append(cycle)
        del cycle
        sets.check_alone()
    finally:
        gc.enable()


def test_other_shapes_for_the_second_set_end_the_start(model: torch.nn.Linear, runner: Runner) -> None:
    def fewer() -> int:
        taken = runner.capture_model()
        runner.cudagraph_manager.graphs.popitem()
        return taken

    runner.capture_model()
    with pytest.raises(RuntimeError, match="other shapes"):
        two_sets(model).capture_second(graph_holders(runner, 4), fewer)


def test_without_any_graph_a_swap_takes_the_parameters_alone(model: torch.nn.Linear, runner: Runner) -> None:
    sets = two_sets(model)
    sets.capture_second(graph_holders(runner, 0), lambda: 0)
    assert sets.complete
    sets.use(1)
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 2), 26.0))


def test_a_swap_that_fails_half_way_leaves_all_as_it_was(model: torch.nn.Linear, runner: Runner) -> None:
    sets = captured_twice(runner, two_sets(model))
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
