"""Between processes that can't share memory: NCCL broadcasts of buckets, scattered from two staging buffers.

The communicator is this transport's own: not the default group, not the engine's, with a store of its own, and without
torch's watchdog. That would tell of a dead trainer to the process's first group, the engine's own, which ends the
process for it minutes later. This module watches each broadcast itself and aborts the communicator when it is late. It
looks at events of its own on the streams, which come when the device is done and not before.

A broadcast whose sender has died keeps a kernel running, and some of what an engine does then waits for it: vLLM's
first step with a new sequence may load a kernel. So a rank that waits asks again and again whether the trainer lives.

A process's first communicator loads NCCL's kernels, during which an engine of one rank, which has no communicator of
its own, can't step. So that is done when a rank first joins, not at its first version.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from inflight.messages import BucketMeta
from inflight.weights.transport import cuda
from inflight.weights.transport.base import TransportError, first_line, from_trainer
from inflight.weights.transport.bounded import within
from inflight.weights.transport.landing import Landing, Strip, by_bucket, from_buffer
from inflight.weights.transport.rendezvous import Board
from inflight.weights.transport.sums import BufferSums, RankSums, SenderSums

_POLL_S = 0.0002
_LOOK_S = 0.05
"""How often a rank that waits for a broadcast asks for the sender."""
_UNWATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""No thread of torch's looks at such a group. Its works are not waited for, which would block: the stream waits."""
_unfinished: list[list[torch.Tensor]] = []
"""Staging buffers of closed receivers that the device may still use: never freed."""
_making = threading.Lock()
"""One at a time: what two threads put into the environment and take out of it would stay there, or lack."""


class _Group:
    """A communicator with rank 0 as the trainer, formed at the first use on the buffer's device."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self._board, self._rank, self._size = board, rank, size
        self._group: Any = None
        self._closed = False
        self._lock = threading.Lock()

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Queues one broadcast from rank 0, after what the current stream holds; returns its work. Raises
        TransportError when the communicator was aborted: another one would wait for ranks that are gone."""
        phase = "receive" if self._rank else "send"
        with self._lock:
            group = self._opened(phase)
        try:
            return (group or self._formed(tensor.device, phase)).broadcast([tensor], from_trainer())
        except TransportError:
            raise
        except RuntimeError as error:
            raise TransportError(f"{phase}: {error}") from error

    def _opened(self, phase: str) -> Any:
        """The communicator, if there is one already. Under the lock."""
        if self._closed:
            raise TransportError(f"{phase}: closed")
        return self._group

    def _formed(self, device: torch.device, phase: str) -> Any:
        """A communicator that all ranks have joined. NCCL itself waits for ever for one that is stopped meanwhile."""
        others = [f"transport rank {rank}" for rank in range(1, self._size)] if self._rank == 0 else ["the trainer"]
        try:
            if self._rank:
                self._board.reply(f"here/{self._rank}", b"", "the trainer", phase)
            else:
                for rank, who in enumerate(others, start=1):
                    self._board.take(f"here/{rank}", who, phase)
            return within(self._board.timeout_s, lambda: self._form(device, phase))
        except TimeoutError:
            self.abort()
            told = f"{phase}: no communicator with {', '.join(others)} within {self._board.timeout_s:g} s"
            raise TransportError(told) from None
        except RuntimeError:  # also TransportError
            self.abort()
            raise

    def _form(self, device: torch.device, phase: str) -> Any:
        """In a thread that may be left behind: what it does late, it does to memory of its own."""
        cuda.bind(device)
        with self._lock:
            self._opened(phase)
            group = self._group = _made(dist.PrefixStore("nccl", self._board.store), self._rank, self._size)
        stream, first = torch.cuda.Stream(device), torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            one = torch.zeros(1, device=device)
            group.broadcast([one], from_trainer()).block_current_stream()
            first.record(stream)
        first.synchronize()
        with self._lock:
            late = self._closed
        if late:
            group.abort()
            raise TransportError(f"{phase}: closed")
        return group

    def finish(self, done: torch.cuda.Event, phase: str) -> None:
        """Waits for what was queued before `done`. Raises TransportError after aborting the communicator when that is
        late or failed, or when the sender is gone or this side was closed meanwhile: what was aborted looks done."""
        now = time.monotonic()
        deadline, look = now + self._board.timeout_s, now + _LOOK_S
        try:
            while not done.query():
                now = time.monotonic()
                if now > deadline:
                    raise TransportError(f"{phase}: a broadcast did not end within {self._board.timeout_s:g} s")
                if self._rank and now > look:
                    self._board.confirm("the trainer", phase, max(deadline - now, _LOOK_S))
                    look = time.monotonic() + _LOOK_S
                time.sleep(_POLL_S)
            if self._closed:
                raise TransportError(f"{phase}: closed")
        except RuntimeError as error:
            self.abort()
            raise error if isinstance(error, TransportError) else TransportError(f"{phase}: {error}") from error

    def abort(self) -> None:
        """Ends the communicator without waiting for anyone; there will be no other."""
        with self._lock:
            self._closed = True
            group, self._group = self._group, None
        if group is not None:
            group.abort()


def warm_up(device: torch.device, limit_s: float) -> None:
    """Loads NCCL's kernels once, by a communicator of one. Raises TransportError unless that is done in `limit_s`."""
    try:
        within(limit_s, lambda: _load(device))
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(f"open: NCCL can't be used on {device}: {first_line(error)}") from None


@cache
def _load(device: torch.device) -> None:
    cuda.bind(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # an engine's own would wait
        alone = _made(dist.HashStore(), 0, 1)
        alone.allreduce([torch.zeros(1, device=device)]).block_current_stream()
        alone.abort()


def _made(store: dist.Store, rank: int, size: int) -> Any:
    with _making, _environment(_UNWATCHED):
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


class NcclSender:
    """Trainer side, rank 0. The buffer must be complete on the device when `send` is called."""

    def __init__(self, size: int, timeout_s: float, sums: BufferSums | None = None) -> None:
        self._board = Board("", timeout_s)
        self._group = _Group(self._board, 0, size)
        self._sums = SenderSums(self._board, size, sums)
        self._sent = 0
        self._stream: torch.cuda.Stream | None = None

    @property
    def rendezvous(self) -> str:
        """What receivers need to find this sender."""
        return self._board.address

    def send(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Sums what the ranks keep, then broadcasts bucket by bucket; returns when `buffer` may be written again."""
        number = self._sent
        self._sent += 1
        cuda.bind(buffer.device)
        self._stream = self._stream or torch.cuda.Stream(buffer.device)
        with torch.cuda.stream(self._stream):
            self._sums.post(number, buffer)
            works = [self._group.broadcast(buffer[b.offset : b.offset + b.nbytes]) for b in buckets]
            sent = [_behind(work, self._stream) for work in works]
        for done in sent:
            self._group.finish(done, "send")

    def close(self) -> None:
        """Ends a wait for ranks and aborts the communicator."""
        self._board.close()
        self._group.abort()


class NcclReceiver:
    """Rank side."""

    def __init__(self, rendezvous: str, rank: int, size: int, timeout_s: float, *, verify: bool = False) -> None:
        self._board = Board(rendezvous, timeout_s)
        self._group = _Group(self._board, rank, size)
        self._sums = RankSums(self._board, rank, verify=verify)
        self._received = 0
        self._streams: list[torch.cuda.Stream] = []
        self._staging: list[torch.Tensor] = []
        self._parts: tuple[Landing, list[list[Strip]]] | None = None

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Fills uint8 `buffer`, which is on a CUDA device."""
        cuda.bind(buffer.device)
        self._prepare(buffer.device, 0)
        strips = [[Strip(bucket.offset, bucket.offset, bucket.nbytes)] for bucket in buckets]
        with torch.cuda.stream(self._streams[0]):
            self._sums.begin(strips, buffer.device)
            works = [self._group.broadcast(buffer[b.offset : b.offset + b.nbytes]) for b in buckets]
            landed = []
            for index, work in enumerate(works):
                work.block_current_stream()
                self._sums.add(index, buffer)
                landed.append(self._streams[0].record_event())
        self._finish(landed)

    def receive_into(self, landing: Landing, buckets: list[BucketMeta]) -> None:
        """Receives each bucket into one of two staging buffers and scatters it while the next one comes; verifies what
        has landed. See DirectReceiver."""
        cuda.bind(landing.device)
        self._prepare(landing.device, max(bucket.nbytes for bucket in buckets))
        parts = self._strips_of(landing, buckets)
        with torch.cuda.stream(self._streams[0]):
            kept = [from_buffer(part, bucket) for part, bucket in zip(parts, buckets, strict=True)]
            self._sums.begin(kept, landing.device)
        landed: list[torch.cuda.Event] = []
        for i, bucket in enumerate(buckets):
            stream, staging = self._streams[i % 2], self._staging[i % 2]
            with torch.cuda.stream(stream):
                work = self._group.broadcast(staging[: bucket.nbytes])
                work.block_current_stream()
                cuda.copy(parts[i], staging.data_ptr(), landing.address, stream.cuda_stream)
                self._sums.add(i, landing.target)
            landed.append(stream.record_event())
        self._finish(landed)

    def _finish(self, landed: list[torch.cuda.Event]) -> None:
        """`landed` come in the order in which they were queued; the last of each stream is behind all that it does."""
        number = self._received
        self._received += 1
        for done in landed:
            self._group.finish(done, "receive")
        with torch.cuda.stream(self._streams[0]):
            self._sums.check(number)

    def close(self) -> None:
        """Ends a wait for the trainer, aborts the communicator and frees the staging buffers.

        Raises TransportError when copies behind a broadcast have not ended in time: they write to the shadow, which is
        not to be filled again before.
        """
        self._board.close()
        self._group.abort()
        deadline = time.monotonic() + self._board.timeout_s
        while not all(stream.query() for stream in self._streams):
            if time.monotonic() > deadline:
                _unfinished.append(self._staging)
                raise TransportError(f"close: the device still copies after {self._board.timeout_s:g} s")
            time.sleep(_POLL_S)
        self._staging.clear()

    def _prepare(self, device: torch.device, staging_bytes: int) -> None:
        if not self._streams:
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        if staging_bytes and (not self._staging or self._staging[0].numel() < staging_bytes):
            self._staging = [torch.empty(staging_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def _strips_of(self, landing: Landing, buckets: list[BucketMeta]) -> list[list[Strip]]:
        if self._parts is None or self._parts[0].strips != landing.strips:
            self._parts = (landing, by_bucket(landing.strips, buckets))
        return self._parts[1]


def _behind(work: Any, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that comes when the work is done. The current stream is `stream`; it waits, not this thread."""
    work.block_current_stream()
    return stream.record_event()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The process group reads these when it is made; the engine's own groups were made before."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)
