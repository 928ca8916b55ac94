"""The shadow with graphs of its own: in which order a swap does what, and what it does without a second capture."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.generator.shadow.layout import move_into
from inflight.weights.receive.shadow import TornWeights
from tests.unit.graphs import SIZES, Graph, Runner, layout_of

GIB = 2**30


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2).requires_grad_(False)


@pytest.fixture
def shadow(cuda: Any, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The shadow of a model whose weights lie in an arena."""
    stream = SimpleNamespace(parameter=model.weight, cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(Graph, "raw_cuda_graph_exec", lambda graph: graph, raising=False)
    layout = layout_of(model)
    live, other = torch.zeros(264, dtype=torch.uint8), torch.zeros(264, dtype=torch.uint8)
    move_into(layout, live)
    arena = SimpleNamespace(live=live, shadow=other, add_shadow=lambda: None)
    module = importlib.import_module("bench.compared_worker")
    return module.ComparedGraphs(arena, layout, lambda _: None, whole=True, any_rank=bool, required=False)


def plan(shadow: Any, runner: Runner, any_rank: Callable[[bool], bool], *, required: bool) -> None:
    """What the worker does when the model is loaded."""
    shadow._any_rank, shadow._required = any_rank, required
    shadow.plan_graphs(runner)


def test_a_swap_marks_the_last_use_before_it_takes_the_other_set(shadow: Any, model: torch.nn.Linear) -> None:
    for _ in range(3):
        old, new = shadow.live, shadow.target()
        assert old.data_ptr() != new.data_ptr()
        shadow.swap()
        assert shadow._swapped.recorded[-1] == old.data_ptr()
        assert model.weight.data_ptr() == shadow.live.data_ptr() == new.data_ptr()
        assert shadow.target() is old
        shadow.settle()


def test_a_failure_of_the_step_before_the_swap_reaches_the_filling_thread(
    shadow: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.Event, "error", RuntimeError("CUDA error: an illegal memory access"))
    shadow.swap()
    with pytest.raises(TornWeights, match="illegal memory access"):
        shadow.settle()


def test_both_sets_hold_the_same_at_the_start(shadow: Any, model: torch.nn.Linear) -> None:
    assert torch.equal(shadow.target(), shadow.live)
    assert torch.equal(shadow.live[:24].view(torch.float32), model.weight.flatten())


def test_a_copy_leaves_parameters_and_graphs_where_they_are(shadow: Any, model: torch.nn.Linear) -> None:
    shadow.swap_by("copy")
    at = model.weight.data_ptr()
    shadow.target().fill_(7)
    shadow.swap()
    assert model.weight.data_ptr() == at == shadow.live.data_ptr() != shadow.target().data_ptr()
    assert shadow.live.unique().tolist() == [7]
    shadow.swap_by(None)
    shadow.swap()
    assert model.weight.data_ptr() != at
    with pytest.raises(ValueError, match="by graphs, copy, not by 'calls'"):
        shadow.swap_by("calls")


Start = Callable[..., Any]


@pytest.fixture
def start(shadow: Any, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch) -> Start:
    """vLLM's start as far as graphs go: what swaps afterwards, and the runner with `before` done to it."""

    def started(*, required: bool = False, others: bool = False, eager: bool = False) -> Any:
        runner = Runner(model, monkeypatch)
        plan(shadow, runner, lambda bad: bad or others, required=required)
        if not eager:
            shadow.taken = runner.capture_model()
        return shadow.ready(runner)

    return started


def test_both_sets_are_captured_and_put_on_the_device_at_the_start(shadow: Any, start: Start, cuda: Any) -> None:
    assert start() is shadow
    assert shadow.taken == 200
    assert len(cuda.uploaded) == 8
    assert cuda.uploaded == [*shadow._sets.graphs(0), *shadow._sets.graphs(1)]


def test_without_cuda_graphs_the_parameters_are_looked_at_all_the_same(
    shadow: Any, start: Start, model: torch.nn.Linear
) -> None:
    kept = model.weight.t()
    gc.freeze()  # as vLLM does when it is ready, before it is asked what swaps
    try:
        remapping = start(eager=True)
        assert gc.get_freeze_count() > 0, "as it was"
    finally:
        gc.unfreeze()
    assert type(remapping).__name__ == "ComparedRemap"
    del kept


def test_without_cuda_graphs_a_swap_takes_the_parameters(shadow: Any, start: Start) -> None:
    assert start(eager=True) is shadow


def test_memory_is_planned_for_both(shadow: Any, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(model, monkeypatch)
    plan(shadow, runner, bool, required=True)
    assert runner.profile_cudagraph_memory() == GIB, "vLLM does not tell"
    runner.estimate = 40
    assert runner.profile_cudagraph_memory() == 80


def test_planning_may_capture_before_the_start(
    shadow: Any, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.32 on vLLM's planning calls `capture_model(profile_only=True)`, which must not capture the second set."""
    runner = Runner(model, monkeypatch)
    plan(shadow, runner, bool, required=True)
    assert runner.capture_model(profile_only=True) == 30
    assert not shadow._sets.complete
    assert runner.capture_model() == 200
    assert shadow.ready(runner) is shadow


def test_a_driver_that_does_not_upload_costs_time_alone(
    shadow: Any, start: Start, cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.status = 1
    with caplog.at_level("WARNING", logger="vllm.inflight"):
        assert start() is shadow
    assert "cuGraphUpload" in caplog.text


def _little_memory(shadow: Any, cuda: Any) -> dict[str, bool]:
    shadow.peak_bytes = 3 * GIB
    return {}


def _no_memory_for_graphs(shadow: Any, cuda: Any) -> dict[str, bool]:
    shadow.peak_bytes, cuda.free = 100, 150  # the first set's took 100
    return {}


def _other_rank(shadow: Any, cuda: Any) -> dict[str, bool]:
    return {"others": True}


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (_little_memory, r"a step up to 3\.00 GiB, 2\.00 GiB are free"),
        (_no_memory_for_graphs, "a second set of CUDA graphs takes up to"),
        (_other_rank, "another rank can't, see its log"),
    ],
)
def test_what_cant_be_captured_twice_is_remapped_or_refused_on_all_ranks(
    shadow: Any,
    start: Start,
    cuda: Any,
    model: torch.nn.Linear,
    caplog: pytest.LogCaptureFixture,
    trouble: Any,
    told: str,
) -> None:
    with caplog.at_level("WARNING", logger="vllm.inflight"):
        remapping = start(**trouble(shadow, cuda))
    assert caplog.text.count("swap remap instead of graphs") == 1
    assert shadow.taken == 100, "captured once"
    assert type(remapping).__name__ == "ComparedRemap"
    assert model.weight.data_ptr() == remapping.live.data_ptr()
    with pytest.raises(ValueError, match=rf"generator.swap=graphs: .*{told}.*use remap"):
        start(required=True, **trouble(shadow, cuda))


def test_a_second_capture_that_fails_half_way_ends_the_start(
    shadow: Any, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(model, monkeypatch)
    capture, calls = runner.capture_model, []

    def short() -> int:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture()

    runner.capture_model = short  # type: ignore[method-assign]
    plan(shadow, runner, bool, required=False)
    half = importlib.import_module("inflight.generator.shadow.graphs").HalfCaptured
    with pytest.raises(half, match=r"use generator.swap=remap: OutOfMemoryError: CUDA out of memory"):
        runner.capture_model()


def test_a_second_set_that_took_more_than_thought_is_given_back(
    shadow: Any, model: torch.nn.Linear, cuda: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(model, monkeypatch)
    capture = runner.capture_model

    def greedy() -> int:
        cuda.free -= GIB
        return capture()

    runner.capture_model = greedy  # type: ignore[method-assign]
    shadow.peak_bytes = GIB - 100
    cuda.free = 2 * GIB
    plan(shadow, runner, bool, required=False)
    with caplog.at_level("WARNING", logger="vllm.inflight"):
        assert runner.capture_model() == 100
    assert "0.00 GiB more and a step up to 1.00 GiB, 0.00 GiB are free" in caplog.text
    remapping = shadow.ready(runner)
    assert type(remapping).__name__ == "ComparedRemap"
    assert not shadow._sets.complete
    assert model.weight.data_ptr() == remapping.live.data_ptr()
    runner.run(SIZES[0])
    assert Graph.replayed[0].data_ptr() == remapping.live.data_ptr()


def test_an_unexpected_error_is_reported_to_the_other_ranks_too(
    shadow: Any, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(model, monkeypatch)
    runner.cudagraph_manager = SimpleNamespace(graphs={})
    del runner.parallel_config
    asked: list[bool] = []
    plan(shadow, runner, lambda bad: asked.append(bad) or bad, required=False)
    with caplog.at_level("WARNING", logger="vllm.inflight"):
        assert runner.capture_model() == 100
    assert asked == [True]
    assert "remap instead of graphs: AttributeError" in caplog.text
    assert type(shadow.ready(runner)).__name__ == "ComparedRemap"
