"""Which transport the weights take to one generator, by what its ranks and the trainer say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from inflight.config.publish import ON_DEVICE, ON_HOST
from inflight.messages import Place
from inflight.weights.transport import resolve
from inflight.weights.transport.place import gpu_of, place_of


class TransportChoice:
    """For `auto`: CUDA IPC to ranks on the trainer's host that see its GPU, NCCL to other ranks on CUDA, gloo to those
    on a CPU. Any other configured transport is that of all generators."""

    def __init__(
        self,
        configured: str,
        device: torch.device,
        why_not_ipc: Callable[[torch.device], str] | None = None,
        here: Place | None = None,
        gpu: str | None = None,
    ) -> None:
        """`device` has the trainer's parameters, and is in the process `here`. Raises TransportError for `ipc` when
        other processes can't map its memory."""
        self.usual = resolve(configured, device, why_not_ipc)
        """The transport to a rank on this host, which also says where the send buffer is."""
        self._configured = configured
        self._here = here or place_of(device)
        self._gpu = gpu_of(device) if gpu is None else gpu

    def of(self, places: Sequence[Place | None]) -> str:
        """The transport to a generator whose ranks are at `places`; None: unknown, a process of this host."""
        if self._configured != "auto" or self.usual == "gloo":
            return self.usual
        if any(place is not None and place.device == "cpu" for place in places):
            return "gloo"
        return self.usual if all(map(self._sees_trainer, places)) else "nccl"

    def objection(self, place: Place | None, checksum: str, vllm: str = "") -> str:
        """Why a rank can't be sent this trainer's versions, whose manifest has `checksum`; empty when it can. `vllm`:
        the release of the ranks that are there, empty when there are none."""
        if place is None:
            return ""
        kind = self.of([place])
        own = self._here
        differs = _series(place.torch) != _series(own.torch)
        if place.inflight != own.inflight:
            return f"it has inflight {place.inflight or 'of unknown release'}, the trainer {own.inflight}"
        if place.vllm and vllm and place.vllm != vllm:
            return f"it has vLLM {place.vllm}, another generator of this run {vllm}"
        if differs and kind != "ipc":
            return f"it has torch {place.torch}, the trainer {own.torch}, whose {kind} may differ"
        if kind == "ipc" and not self._sees_trainer(place):
            return "publish.transport=ipc, and it is on another host or does not see the trainer's GPU"
        if kind in ON_DEVICE and place.device == "cpu":
            return f"publish.transport={kind}, and it computes on a CPU"
        if kind in ON_HOST and checksum == "sum64":
            return "publish.checksum=always has sums that devices compute, and it computes on a CPU"
        return ""

    def _sees_trainer(self, place: Place | None) -> bool:
        return place is None or (place.host == self._here.host and self._gpu in place.gpus)


def _series(release: str) -> str:
    """`2.11` of `2.11.0`."""
    return ".".join(release.split(".")[:2])
