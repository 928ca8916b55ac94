"""Versions from files, for offline use, tests and benches: they replace a publisher's bytes."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from inflight.weights.receive.shadow import Shadow, SwapRefused


class Staging:
    """Fills one shadow from safetensors files, in a thread of its own, and swaps it."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self.version: int | None = None
        """The version that is built and not committed yet."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def stage(self, path: Path, version: int, *, wait: bool) -> None:
        """Builds `version` from a file, the way received bytes are built; see `staged` for `wait=False`.

        Raises SwapRefused while another one is built, and with `wait` what building raises.
        """
        if self._thread is not None and self._thread.is_alive():
            raise SwapRefused("another version is being staged")
        self.version = self._error = None

        def stage() -> None:
            try:
                self._fill(path)
                self.version = version
            except BaseException as error:  # noqa: BLE001 - raised again by `staged`
                self._shadow.discard()
                self._error = error

        # Always in a thread of its own, so that weights from a file are built by the same threading as received ones.
        self._thread = threading.Thread(target=stage, name="inflight stage", daemon=True)
        self._thread.start()
        if wait:
            self._thread.join()
            self.staged()

    def staged(self) -> int | None:
        """The version that is staged, None while it is being built. Raises what building raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.version

    def swap(self, version: int, rank: int) -> None:
        """Makes `version` live. Raises SwapRefused unless exactly this one is staged."""
        if self.version != version:
            raise SwapRefused(f"version {version} is not staged on rank {rank}: {self.version} is")
        self._shadow.swap()
        self.version = None

    def _fill(self, path: Path) -> None:
        from safetensors import safe_open

        from inflight.types import DTYPE_BYTES, ParamMeta
        from inflight.weights.pack import unpack
        from inflight.weights.plan import plan

        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        metas = [
            ParamMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        ]
        if foreign := [meta for meta in metas if meta.dtype not in DTYPE_BYTES]:
            raise ValueError(f"{path}: {foreign[0].name} is {foreign[0].dtype}, weights are {', '.join(DTYPE_BYTES)}")
        manifest = plan(metas, tied={}, bucket_bytes=64 << 20, checksum="none")
        buffer = self._shadow.begin(manifest)
        slots = unpack(manifest, buffer)
        for name, tensor in tensors.items():
            slots[name].copy_(tensor)
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        self._shadow.build()
