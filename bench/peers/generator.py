"""A generator that can also be updated in the ways of other projects.

    python -m bench.peers.generator --run-dir RUN --name g0

It is inflight's own, with a worker class that counts weights which vLLM's update has written as a version, vLLM's NCCL
transfer configured, and a socket by which the trainer calls its engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bench.peers.control import SOCKET, Control
from inflight.generator import __main__ as process
from inflight.generator import engine_args, server
from inflight.generator.agent import EngineAgent
from inflight.processes import leave

CPU_WORKER = "bench.peers.worker_cpu.PeersCPUWorker"
CUDA_WORKER = "bench.peers.worker_cuda.PeersCUDAWorker"


class ControlledAgent(EngineAgent):
    """Serves the bench's calls beside the publisher's messages."""

    async def run(self) -> None:
        async with Control(self.engine, Path(os.environ[SOCKET])).serving():
            await super().run()


def worker_of(config: Any, *, cpu: bool) -> str:
    """The bench's worker class."""
    return CPU_WORKER if cpu else CUDA_WORKER


def main() -> int:
    """Runs inflight's generator with the bench's parts in the place of its own."""
    values_of = server.engine_values

    def with_transfer(config: Any, name: str, worker: str) -> dict[str, Any]:
        if worker == CPU_WORKER:
            return {**values_of(config, name, engine_args.CPU_WORKER), "worker_cls": worker}
        values = {**values_of(config, name, engine_args.CUDA_WORKER), "worker_cls": worker}
        from vllm.config.weight_transfer import WeightTransferConfig

        return {**values, "weight_transfer_config": WeightTransferConfig(backend="nccl")}

    server.worker_of = worker_of
    server.engine_values = with_transfer
    server.EngineAgent = ControlledAgent
    return process.main(sys.argv[1:])


if __name__ == "__main__":
    leave(main())
