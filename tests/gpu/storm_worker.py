"""The CUDA worker, with a way to commit the other set as it is: at start both sets hold the same bytes."""

from __future__ import annotations

from inflight.generator.cuda_worker import InflightCUDAWorker


class StormWorker(InflightCUDAWorker):
    """See the module's text."""

    def restage(self, version: int) -> None:
        """RPC: takes the other set for `version`."""
        self.inflight_staged = version
