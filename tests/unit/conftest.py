"""CUDA as far as unit tests need it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

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
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As much of CUDA as a shadow needs, without a device: the driver, which notes what it does."""

    def a_type(name: str) -> type:  # for annotations
        if name.startswith("__"):
            raise AttributeError(name)
        return object

    driver: Any = ModuleType("cuda.bindings.driver")
    driver.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    driver.uploaded, driver.status = [], 0
    driver.cuGraphUpload = lambda graph, _: (driver.uploaded.append(graph), (driver.status,))[1]
    driver.__getattr__ = a_type
    driver.Event = Event
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = driver
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    driver.free = 2 * GIB
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (driver.free, 80 * GIB))
    monkeypatch.setattr(Event, "error", None)
    before = set(sys.modules)
    yield driver
    for name in set(sys.modules) - before:
        if name.startswith(("inflight.", "bench.")):  # they hold the driver that is none
            parent, _, child = name.rpartition(".")
            del sys.modules[name]
            vars(sys.modules.get(parent, ModuleType(parent))).pop(child, None)
