"""The transports by name. One is imported only when it is used, so its libraries may be absent otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from inflight.config.network import NetworkConfig
from inflight.config.publish import ON_HOST, TRANSPORTS
from inflight.messages import Welcome
from inflight.weights.transport.base import Receiver, Sender, TransportError
from inflight.weights.transport.rendezvous import HERE
from inflight.weights.transport.sums import BufferSums

log = logging.getLogger(__name__)

PROBE_BYTES = 32 << 20
"""Bytes of a trial allocation: more than the blocks that torch shares among small tensors."""


def resolve(kind: str, device: torch.device, why_not_ipc: Callable[[torch.device], str] | None = None) -> str:
    """The transport that `auto` means for parameters on `device`; any other name is returned unchanged.

    `why_not_ipc` returns the reason why other processes can't map memory that torch allocates on a device; empty: they
    can. By default it tries. Raises TransportError for `ipc` when they can't.
    """
    if kind == "auto" and device.type != "cuda":
        return "gloo"
    if kind not in ("auto", "ipc"):
        return kind
    # Both sides are on one host, where copy engines transfer and no SM of a decoding GPU takes part.
    reason = (why_not_ipc or _why_not_ipc)(device)
    if reason and kind == "ipc":
        raise TransportError(f"open: publish.transport=ipc: {reason}; nccl or auto do without")
    if reason:
        log.warning("weights are sent over NCCL, not CUDA IPC: %s", reason)
    return "nccl" if reason else "ipc"


def _why_not_ipc(device: torch.device) -> str:
    from inflight.weights.transport.ipc import export

    try:
        export(torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device))
    except TransportError as error:
        return str(error).removeprefix("send: ")
    return ""


def checksum_of(kind: str, asked: str) -> str:
    """The checksum that a rank verifies: CRC-32 of each bucket on the host, sums computed by the devices (sums.py) on
    CUDA, these only for `always`. See PublishConfig."""
    if asked == "none" or (asked == "auto" and kind not in ON_HOST):
        return "none"
    return "crc32" if kind in ON_HOST else "sum64"


def make_sender(
    kind: str, size: int, timeout_s: float, sums: BufferSums | None = None, network: NetworkConfig = HERE
) -> Sender:
    """The trainer's side, rank 0 of `size`, which listens on `network`; `sums` are common to all senders of one buffer.

    Raises TransportError for an unknown kind or when it can't be opened.
    """
    if kind == "gloo":
        from inflight.weights.transport.gloo import GlooSender

        return GlooSender(size, timeout_s, network)
    if kind == "nccl":
        from inflight.weights.transport.nccl import NcclSender

        return NcclSender(size, timeout_s, sums, network)
    if kind == "ipc":
        from inflight.weights.transport.ipc import IpcSender

        return IpcSender(size, timeout_s, sums, network)
    raise TransportError(f"open: no transport is named {kind!r}: {', '.join(TRANSPORTS)} are")


def make_receiver(welcome: Welcome, network: NetworkConfig = HERE) -> Receiver:
    """A rank's side, for the publisher's Welcome. Raises TransportError when it can't be made."""
    place = (welcome.rendezvous, welcome.transport_rank, welcome.transport_size, welcome.timeout_s)
    if welcome.transport == "gloo":
        from inflight.weights.transport.gloo import GlooReceiver

        return GlooReceiver(*place, network)
    if welcome.transport == "nccl":
        from inflight.weights.transport.nccl import NcclReceiver

        return NcclReceiver(*place, verify=welcome.manifest.checksum == "sum64")
    if welcome.transport == "ipc":
        from inflight.weights.transport.ipc import IpcReceiver

        return IpcReceiver(*place, verify=welcome.manifest.checksum == "sum64")
    raise TransportError(f"connect: no transport is named {welcome.transport!r}: {', '.join(TRANSPORTS)} are")


def make_buffer(kind: str, nbytes: int, device: torch.device) -> torch.Tensor:
    """The send buffer, uint8 `[nbytes]`, zeroed (padding between parameters is sent too): in host memory or on the
    parameters' device, as the transport needs it."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu" if kind in ON_HOST else device)
