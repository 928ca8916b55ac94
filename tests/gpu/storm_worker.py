"""The CUDA worker, with a way to commit the other set as it is: at start both sets hold the same bytes."""

from __future__ import annotations

import time

import torch

from bench.compared_worker import ComparedWorker


class StormWorker(ComparedWorker):
    """See the module's text."""

    def timed_swap(self) -> float:
        """RPC: milliseconds for which an idle device is busy with a swap, or waits for it."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.inflight_shadow.swap()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)

    def restage(self, version: int) -> None:
        """RPC: takes the other set for `version`."""
        self._staging.version = version
