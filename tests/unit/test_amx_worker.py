"""The workers on CPU ask for AMX first: without that Linux ends them at the first AMX instruction, with SIGILL."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm.v1.worker.cpu_worker")
from vllm.v1.worker.cpu_worker import CPUWorker

from inflight.generator.worker.adapter_cpu import InflightCPUAdapterWorker
from inflight.generator.worker.cpu import InflightCPUWorker


@pytest.mark.parametrize("kind", [InflightCPUWorker, InflightCPUAdapterWorker])
def test_a_worker_asks_before_it_computes(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: events.append("asked"), raising=False)
    monkeypatch.setattr(CPUWorker, "init_device", lambda self: events.append("initialised"))
    kind.__new__(kind).init_device()
    assert events == ["asked", "initialised"]
