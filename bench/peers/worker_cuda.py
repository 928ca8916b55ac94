"""The worker on CUDA: inflight's, whose live weights vLLM's own update may write as well."""

from __future__ import annotations

from typing import Any

from inflight.generator.worker.cuda import InflightCUDAWorker


class PeersCUDAWorker(InflightCUDAWorker):
    """A version that vLLM's update has written in place is committed without a swap: only its stamp is new."""

    _written = False

    def finish_weight_update(self, *args: Any, **options: Any) -> Any:
        """RPC: as vLLM's; notes that the live weights are others now."""
        finished = super().finish_weight_update(*args, **options)
        self._written = True
        return finished

    def commit_weights(self, version: int) -> dict[str, Any]:
        if not self._written:
            return super().commit_weights(version)
        self._written = False
        return {"gap_s": 0.0}
