"""The worker for adapters on CUDA: `worker_cls="inflight.generator.worker.adapter_cuda.InflightCUDAAdapterWorker"`."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from inflight.generator.worker.adapters import AdapterWorkerMixin
from inflight.generator.worker.cuda import prepare
from inflight.messages import Welcome
from inflight.weights.transport.base import Receiver


class InflightCUDAAdapterWorker(AdapterWorkerMixin, Worker):
    """vLLM's CUDA worker whose adapters have two slots each. Its CUDA graphs are captured once, by vLLM."""

    inflight_device = "CUDA"

    def connect(self, welcome: Welcome) -> Receiver:
        """A transport that fills the receive buffer, which is small: the slots are filled from there."""
        prepare(welcome, self.device)
        return super().connect(welcome)
