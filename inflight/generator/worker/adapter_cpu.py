"""The worker for adapters on CPU: `worker_cls="inflight.generator.worker.adapter_cpu.InflightCPUAdapterWorker"`."""

from __future__ import annotations

from inflight.generator.worker.adapters import AdapterWorkerMixin
from inflight.generator.worker.amx import AmxCPUWorker


class InflightCPUAdapterWorker(AdapterWorkerMixin, AmxCPUWorker):
    """vLLM's CPU worker whose adapters have two slots each."""

    inflight_device = "CPU"
