"""The worker on CPU, where vLLM has no transfer of weights: a file stands for it, to test the bench."""

from __future__ import annotations

from pathlib import Path

from inflight.generator.worker.cpu import InflightCPUWorker


class PeersCPUWorker(InflightCPUWorker):
    """Takes versions from files beside those of its publisher."""

    def peers_load(self, path: str, version: int) -> None:
        """RPC, while the engine is paused: builds a version from a file; `commit_weights` makes it live."""
        self._staging.stage(Path(path), version, wait=True)

    def _swap(self, version: int) -> None:
        if self._staging.version == version:
            self._staging.swap(version, self.rank)
        else:
            super()._swap(version)
