"""The worker for adapters on CPU: `worker_cls="inflight.generator.worker.adapter_cpu.InflightCPUAdapterWorker"`."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from inflight.generator.worker.adapters import AdapterWorkerMixin


class InflightCPUAdapterWorker(AdapterWorkerMixin, CPUWorker):
    """vLLM's CPU worker whose adapters have two slots each."""

    inflight_device = "CPU"
