"""On one host: each rank pulls from the trainer's send buffer with its copy engines, over CUDA IPC.

No SM takes part. In a loop without vLLM the copies make a step of 4 ms 7 % longer while they last
(bench/log/2026-11-30.md). A rank takes only its own strips (scatter.py), in pieces of at most 64 MB, straight into its
shadow; the trainer only waits. The trainer's GPU must be visible to the generator's process.

The ranks follow the trainer's packing: they queue the copies of the bytes that are packed, while it packs the others.
With checksums all is packed first, and summed.

Pulling from a trainer that has died may raise no error and return undefined bytes. So after pulling a rank checks that
the trainer is alive, and without an answer treats the bytes as not received.

The handle of the buffer is sent as 64 bytes, with offset and size, over the rendezvous; then how far it is packed.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterable
from typing import Any

import torch
from cuda.bindings import driver

from inflight.config.network import NetworkConfig
from inflight.messages import BucketMeta
from inflight.weights.transport import cuda
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.rendezvous import HERE, KeyValueStore
from inflight.weights.transport.scatter import CopyRegion, ScatterTarget, split
from inflight.weights.transport.sums import BufferSums, RankSums, SenderSums

PIECE_BYTES = 64 << 20
"""Bytes per order to a copy engine: 0.2 ms over NVLink, so that a step's own small copies never wait long."""
CALL_PIECES = 32
"""Most pieces per driver call, so that a step's own calls never wait long for the driver's lock."""
_HEADER = struct.Struct("<QQ64s")
_PACKED = struct.Struct("<Q")
_LAZY_PEER = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class IpcSender:
    """Trainer side. With checksums the buffer must be complete on the device when `send` is called."""

    follows = True

    def __init__(
        self, size: int, timeout_s: float, sums: BufferSums | None = None, network: NetworkConfig = HERE
    ) -> None:
        self._size = size
        self._store = KeyValueStore("", timeout_s, network)
        self._sums = SenderSums(self._store, size, sums)
        self._stream: torch.cuda.Stream | None = None
        self._sent = 0

    @property
    def rendezvous(self) -> str:
        """The address by which receivers find this sender."""
        return self._store.address

    def send(self, buffer: torch.Tensor, buckets: list[BucketMeta], packed: Iterable[int] = ()) -> None:
        """Sums the ranks' parts of `buffer`, then lets all ranks pull what is packed of them; returns when they have
        everything."""
        number = self._sent
        self._sent += 1
        cuda.bind(buffer.device)
        self._stream = self._stream or torch.cuda.Stream(buffer.device)
        with torch.cuda.stream(self._stream):
            self._sums.post(number, buffer)  # before any rank reads: a buffer overwritten meanwhile has other sums
        ends = iter(packed or [buffer.numel()])
        keys = [f"offer/{number}"]
        self._store.put(keys[0], export(buffer) + _PACKED.pack(next(ends)))
        for end in ends:
            keys.append(f"packed/{number}/{len(keys)}")
            self._store.put(keys[-1], _PACKED.pack(end))
        for rank in range(1, self._size):
            reason = self._store.take(f"done/{number}/{rank}", f"transport rank {rank}", "send", drop=True)
            if reason:
                raise TransportError(f"send: transport rank {rank}: {reason.decode(errors='replace')}")
        for key in keys:
            self._store.drop(key)
        self._store.shut()  # all ranks are connected

    def close(self) -> None:
        """Ends a wait for ranks; the store is freed with the object."""
        self._store.close()


class IpcReceiver:
    """Rank side."""

    def __init__(self, rendezvous: str, rank: int, size: int, timeout_s: float, *, verify: bool = False) -> None:
        self._store = KeyValueStore(rendezvous, timeout_s)
        self._sums = RankSums(self._store, rank, verify=verify)
        self._rank = rank
        self._verify = verify
        self._received = 0
        self._calls: tuple[tuple[CopyRegion, ...], list[list[CopyRegion]]] | None = None
        """The strips of the last transfer and their pieces, one list per driver call."""
        self._closed = threading.Event()
        self._busy = threading.Lock()
        self._open: dict[bytes, int] = {}
        self._stream: torch.cuda.Stream | None = None

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Fills uint8 `buffer`, which is on a CUDA device."""
        strips = tuple(CopyRegion(bucket.offset, bucket.offset, bucket.nbytes) for bucket in buckets)
        self.receive_into(ScatterTarget(buffer, buffer.device, strips), buckets)

    def receive_into(self, scatter: ScatterTarget, buckets: list[BucketMeta]) -> None:
        """Pulls the strips of `scatter` and verifies them; see DirectReceiver."""
        with self._busy:
            try:
                self._pull(scatter)
            finally:
                if self._closed.is_set():
                    self._unmap()

    def _pull(self, scatter: ScatterTarget) -> None:
        number = self._received
        self._received += 1
        cuda.bind(scatter.device)
        self._stream = self._stream or torch.cuda.Stream(scatter.device)
        calls = self._calls_of(scatter)
        with torch.cuda.stream(self._stream):
            self._sums.begin(calls, scatter.device)
        offer = self._store.take(f"offer/{number}", "the trainer", "receive")
        packed = _Packed(self._store, number, offer)
        try:
            self._copy(calls, self._address(offer), scatter, packed)
        except TransportError:
            raise
        except RuntimeError as error:  # also CudaError
            reason = f"pulling from the trainer's buffer failed: {error}"
            self._store.put(f"done/{number}/{self._rank}", reason.encode())
            raise TransportError(f"receive: {reason}") from error
        self._store.reply(f"done/{number}/{self._rank}", b"", "the trainer", "receive")
        with torch.cuda.stream(self._stream):
            self._sums.check(number)

    def _copy(self, calls: list[list[CopyRegion]], source: int, scatter: ScatterTarget, packed: _Packed) -> None:
        """Returns or raises when no copy is under way any more: the shadow may be filled by another transfer then."""
        assert self._stream is not None
        try:
            with torch.cuda.stream(self._stream):
                # A call's pieces are summed after their copies: copying limits the rate, which hardly affects decoding.
                for index, pieces in enumerate(calls):
                    packed.wait(max(piece.source_end for piece in pieces))
                    cuda.copy_in_one_call(pieces, source, scatter.address, self._stream.cuda_stream)
                    self._sums.add(index, scatter.target)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                cuda.wait(self._stream)  # calls before the one that failed
            raise
        cuda.wait(self._stream)

    def _calls_of(self, scatter: ScatterTarget) -> list[list[CopyRegion]]:
        if self._calls is None or self._calls[0] != scatter.strips:
            nbytes = PIECE_BYTES if self._verify else CALL_PIECES * PIECE_BYTES
            as_packed = sorted(scatter.strips, key=lambda strip: strip.source_end)
            self._calls = (scatter.strips, in_calls(as_packed, nbytes))
        return self._calls[1]

    def close(self) -> None:
        """Ends a wait for the trainer and unmaps its buffers; waits for a copy in progress, which is short."""
        self._closed.set()
        self._store.close()
        if self._busy.acquire(blocking=False):
            try:
                self._unmap()
            finally:
                self._busy.release()

    def _unmap(self) -> None:
        for address in self._open.values():
            driver.cuIpcCloseMemHandle(address)
        self._open.clear()

    def _address(self, offer: bytes) -> int:
        offset, _, handle = _HEADER.unpack_from(offer)
        if handle not in self._open:
            self._open[handle] = _mapped(handle)
        return self._open[handle] + offset


class _Packed:
    """How many bytes of a transfer's send buffer are packed, as the sender tells."""

    def __init__(self, store: KeyValueStore, number: int, offer: bytes) -> None:
        self._store = store
        self._number = number
        self._told = 1
        (self._nbytes,) = _PACKED.unpack_from(offer, _HEADER.size)

    def wait(self, nbytes: int) -> None:
        """Returns when the first `nbytes` are. Raises TransportError."""
        while self._nbytes < nbytes:
            told = self._store.take(f"packed/{self._number}/{self._told}", "the trainer", "receive")
            (self._nbytes,) = _PACKED.unpack(told)
            self._told += 1


def in_calls(strips: Iterable[CopyRegion], nbytes: int) -> list[list[CopyRegion]]:
    """The strips in pieces of at most PIECE_BYTES, one list per driver call: at most CALL_PIECES pieces, and at most
    `nbytes` unless it is one piece."""
    calls: list[list[CopyRegion]] = []
    left = 0
    for piece in (piece for strip in strips for piece in split(strip, PIECE_BYTES)):
        if not calls or piece.nbytes > left or len(calls[-1]) == CALL_PIECES:
            calls.append([])
            left = nbytes
        calls[-1].append(piece)
        left -= piece.nbytes
    return calls


def export(buffer: torch.Tensor) -> bytes:
    """Offset in the allocation, size, and the allocation's handle. Raises TransportError when it can't be shared."""
    address: int = buffer.data_ptr()
    try:
        cuda.bind(buffer.device)
        found: Any = cuda.check("cuMemGetAddressRange", driver.cuMemGetAddressRange(address))
        handle = cuda.check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(int(found[0])))
    except cuda.CudaError as error:
        raise TransportError(
            f"send: the send buffer can't be shared between processes ({error}); "
            "torch's expandable segments do not allow it"
        ) from None
    return _HEADER.pack(address - int(found[0]), buffer.numel(), handle.reserved)


def opened(offer: bytes) -> int:
    """Where this process finds what `export` has offered in another one; mapped anew by each call. Raises CudaError."""
    offset, _, handle = _HEADER.unpack(offer)
    return _mapped(handle) + int(offset)


def _mapped(handle: bytes) -> int:
    struct_of_handle = driver.CUipcMemHandle()
    struct_of_handle.reserved = handle
    return int(cuda.check("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(struct_of_handle, _LAZY_PEER)))
