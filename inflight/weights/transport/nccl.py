"""Between hosts, and where memory can't be exported: NCCL broadcasts of buckets, scattered from two staging buffers.

Work that uses the bytes of a broadcast is queued after it on its stream; a thread waits only for the end of all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from inflight.config.network import NetworkConfig
from inflight.messages import BucketMeta
from inflight.weights.transport import cuda
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.communicator import POLL_S, Communicator
from inflight.weights.transport.rendezvous import HERE, KeyValueStore
from inflight.weights.transport.scatter import CopyRegion, ScatterTarget, by_bucket, from_buffer
from inflight.weights.transport.sums import BufferSums, RankSums, SenderSums

_unfinished: list[list[torch.Tensor]] = []
"""Staging buffers of closed receivers that the device may still use: never freed."""


class NcclSender:
    """Trainer side, rank 0. The buffer must be complete on the device when `send` is called: in a broadcast that has
    begun, the ranks hold SMs of their decoding GPUs."""

    follows = False

    def __init__(
        self, size: int, timeout_s: float, sums: BufferSums | None = None, network: NetworkConfig = HERE
    ) -> None:
        self._store = KeyValueStore("", timeout_s, network)
        self._group = Communicator(self._store, 0, size)
        self._sums = SenderSums(self._store, size, sums)
        self._sent = 0
        self._stream: torch.cuda.Stream | None = None

    @property
    def rendezvous(self) -> str:
        """The address by which receivers find this sender."""
        return self._store.address

    def send(self, buffer: torch.Tensor, buckets: list[BucketMeta], packed: Iterable[int] = ()) -> None:
        """Sums the ranks' parts, then broadcasts bucket by bucket; returns when `buffer` may be written again."""
        number = self._sent
        self._sent += 1
        cuda.bind(buffer.device)
        self._stream = self._stream or torch.cuda.Stream(buffer.device)
        with torch.cuda.stream(self._stream):
            self._sums.post(number, buffer)  # before any rank reads: a buffer overwritten meanwhile has other sums
            works = [self._group.broadcast(buffer[b.offset : b.offset + b.nbytes]) for b in buckets]
            sent = [_behind(work, self._stream) for work in works]
        for done in sent:
            self._group.finish(done, "send")
        self._store.shut()  # all ranks are connected

    def close(self) -> None:
        """Ends a wait for ranks and aborts the communicator."""
        self._store.close()
        self._group.abort()


class NcclReceiver:
    """Rank side."""

    def __init__(self, rendezvous: str, rank: int, size: int, timeout_s: float, *, verify: bool = False) -> None:
        self._store = KeyValueStore(rendezvous, timeout_s)
        self._group = Communicator(self._store, rank, size)
        self._sums = RankSums(self._store, rank, verify=verify)
        self._received = 0
        self._streams: list[torch.cuda.Stream] = []
        self._staging: list[torch.Tensor] = []
        self._parts: tuple[ScatterTarget, list[list[CopyRegion]]] | None = None

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Fills uint8 `buffer`, which is on a CUDA device."""
        cuda.bind(buffer.device)
        self._prepare(buffer.device, 0)
        strips = [[CopyRegion(bucket.offset, bucket.offset, bucket.nbytes)] for bucket in buckets]
        with torch.cuda.stream(self._streams[0]):
            self._sums.begin(strips, buffer.device)
            works = [self._group.broadcast(buffer[b.offset : b.offset + b.nbytes]) for b in buckets]
            landed = []
            for index, work in enumerate(works):
                work.block_current_stream()
                self._sums.add(index, buffer)
                landed.append(self._streams[0].record_event())
        self._finish(landed)

    def receive_into(self, scatter: ScatterTarget, buckets: list[BucketMeta]) -> None:
        """Receives each bucket into one of two staging buffers and scatters it while the next one arrives; verifies the
        bytes in their places. See DirectReceiver."""
        cuda.bind(scatter.device)
        self._prepare(scatter.device, max(bucket.nbytes for bucket in buckets))
        parts = self._strips_of(scatter, buckets)
        with torch.cuda.stream(self._streams[0]):
            kept = [from_buffer(part, bucket) for part, bucket in zip(parts, buckets, strict=True)]
            self._sums.begin(kept, scatter.device)
        landed: list[torch.cuda.Event] = []
        for i, bucket in enumerate(buckets):
            stream = self._streams[i % 2]
            staging = self._staging[i % 2]
            with torch.cuda.stream(stream):
                work = self._group.broadcast(staging[: bucket.nbytes])
                work.block_current_stream()
                cuda.copy(parts[i], staging.data_ptr(), scatter.address, stream.cuda_stream)
                self._sums.add(i, scatter.target)
            landed.append(stream.record_event())
        self._finish(landed)

    def _finish(self, landed: list[torch.cuda.Event]) -> None:
        """`landed` are in the order of queueing; the last one of each stream follows all of that stream's work."""
        number = self._received
        self._received += 1
        for done in landed:
            self._group.finish(done, "receive")
        with torch.cuda.stream(self._streams[0]):
            self._sums.check(number)

    def close(self) -> None:
        """Ends a wait for the trainer, aborts the communicator and frees the staging buffers.

        Raises TransportError when NCCL, or copies after a broadcast, have not ended in time: they write to the staging
        buffers and the shadow, which must not be filled again before.
        """
        self._store.close()
        self._group.abort()
        deadline = time.monotonic() + self._store.timeout_s
        while not ((ended := self._group.ended) and all(stream.query() for stream in self._streams)):
            if time.monotonic() > deadline:
                _unfinished.append(self._staging)
                what = "the device still copies" if ended else "NCCL has not ended a communicator"
                raise TransportError(f"close: {what} after {self._store.timeout_s:g} s")
            time.sleep(POLL_S)
        self._staging.clear()

    def _prepare(self, device: torch.device, staging_bytes: int) -> None:
        if not self._streams:
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        if staging_bytes and (not self._staging or self._staging[0].numel() < staging_bytes):
            self._staging = [torch.empty(staging_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def _strips_of(self, scatter: ScatterTarget, buckets: list[BucketMeta]) -> list[list[CopyRegion]]:
        if self._parts is None or self._parts[0].strips != scatter.strips:
            self._parts = (scatter, by_bucket(scatter.strips, buckets))
        return self._parts[1]


def _behind(work: Any, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that follows the work. The current stream is `stream`; it waits, not this thread."""
    work.block_current_stream()
    return stream.record_event()
