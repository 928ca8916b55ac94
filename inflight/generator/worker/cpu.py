"""The CPU worker: `worker_cls="inflight.generator.worker.cpu.InflightCPUWorker"`."""

from __future__ import annotations

from inflight.generator import hooks
from inflight.generator.worker.amx import AmxCPUWorker
from inflight.generator.worker.base import InflightWorkerMixin
from inflight.weights.receive.shadow import Shadow


class InflightCPUWorker(InflightWorkerMixin, AmxCPUWorker):
    """vLLM's CPU worker with a shadow whose swap rebinds packed layers (see rebind.py)."""

    def make_shadow(self) -> Shadow:
        from inflight.generator.shadow.rebind import RebindShadow

        hooks.require("cpu")
        return RebindShadow(self.model_runner.get_model(), self.vllm_config)
