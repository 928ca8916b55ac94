"""The shadow with graphs of its own: in which order a swap does what, and what is told when memory is short."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.generator.cuda_plan import Region
from inflight.weights.shadow import TornWeights

GIB = 2**30


class Event:
    """In place of a CUDA event: notes where a parameter lay when it was recorded."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record(self, stream: Any) -> None:
        self.recorded.append(stream.parameter.data_ptr())

    def synchronize(self) -> None:
        if self.error:
            raise self.error


@pytest.fixture
def shadow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shadow of one parameter, without a device."""
    driver = ModuleType("cuda.bindings.driver")
    driver.CUresult = SimpleNamespace(CUDA_SUCCESS=0)  # type: ignore[attr-defined]
    driver.uploaded, driver.status = [], 0  # type: ignore[attr-defined]
    driver.cuGraphUpload = lambda graph, _: (driver.uploaded.append(graph), (driver.status,))[1]  # type: ignore[attr-defined]
    driver.__getattr__ = lambda name: object  # type: ignore[method-assign, assignment] - types in annotations
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    parameter = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    stream = SimpleNamespace(parameter=parameter, cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    before = set(sys.modules)
    module = importlib.import_module("inflight.generator.graph_shadow")
    layout: Any = SimpleNamespace(regions=[Region("one", 0, 16)], tensors=[parameter], aliases=[], nbytes=16)
    live = parameter.data.clone().view(torch.uint8)
    made = module.GraphSetsShadow(live, layout, lambda _: None, whole=True)
    made.parameter, made.driver = parameter, driver
    made._sets.use(0)
    yield made
    for name in set(sys.modules) - before:
        if name.startswith("inflight."):  # they hold the driver that is none
            parent, _, child = name.rpartition(".")
            del sys.modules[name]
            vars(sys.modules.get(parent, ModuleType(parent))).pop(child, None)


def test_a_swap_marks_the_last_use_before_it_takes_the_other_set(shadow: Any) -> None:
    Event.error = None
    for _ in range(3):
        old, new = shadow.live, shadow.target()
        assert old.data_ptr() != new.data_ptr()
        shadow.swap()
        assert shadow._last_use.recorded[-1] == old.data_ptr()
        assert shadow.parameter.data_ptr() == shadow.live.data_ptr() == new.data_ptr()
        assert shadow.target() is old
        shadow.settle()


def test_a_step_that_failed_before_the_swap_is_told_to_who_wants_to_fill(
    shadow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "error", RuntimeError("CUDA error: an illegal memory access"))
    shadow.swap()
    with pytest.raises(TornWeights, match="illegal memory access"):
        shadow.settle()


def graphs_of(shadow: Any) -> None:
    graphs = [[{size: SimpleNamespace(raw_cuda_graph_exec=lambda n=number: n)} for size in (4, 2)] for number in (1, 2)]
    shadow._sets._graphs = graphs


def test_graphs_of_both_sets_are_put_on_the_device_at_the_start(shadow: Any) -> None:
    graphs_of(shadow)
    shadow._captured(GIB, GIB)
    assert shadow.driver.uploaded == [1, 1, 2, 2]


def test_a_driver_that_does_not_upload_costs_time_alone(shadow: Any, caplog: pytest.LogCaptureFixture) -> None:
    graphs_of(shadow)
    shadow.driver.status = 1
    with caplog.at_level("WARNING", logger="vllm.inflight"):
        shadow._captured(GIB, GIB)
    assert "cuGraphUpload" in caplog.text


def test_too_little_memory_for_a_step_is_told_at_the_start_not_in_a_step(shadow: Any) -> None:
    graphs_of(shadow)
    shadow.peak_bytes = 3 * GIB
    with pytest.raises(ValueError, match=r"took 2\.00 GiB and leave 2\.00 GiB, a step takes up to 3\.00 GiB"):
        shadow._captured(GIB, GIB)
