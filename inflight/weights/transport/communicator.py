"""An NCCL communicator whose forming and ending have timeouts, and whose broadcasts torch's watchdog does not watch.

It is neither the default group nor the engine's, and has a store of its own. The watchdog would report a dead trainer
to the process's first group, the engine's, which would end the process for it minutes later. This module watches each
broadcast itself and aborts the communicator when it is late. It checks events of its own on the streams, which are
reached when the device is done and not before.

A broadcast whose sender has died keeps a kernel running, and some of an engine's work then waits for it: vLLM's first
step with a new sequence may load a kernel. So a rank that waits checks again and again that the trainer is alive.

A process's first communicator loads NCCL's kernels, during which an engine of one rank, which has no communicator of
its own, can't step. So they are loaded when a rank first joins, not at its first version.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from inflight.error_line import first_line
from inflight.weights.transport import cuda
from inflight.weights.transport.base import TransportError, from_trainer
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.timeout import within

log = logging.getLogger(__name__)

POLL_S = 0.0002
_LOOK_S = 0.05
"""Seconds between checks of the sender by a rank that waits for a broadcast."""
_END_S = 2.0
"""Seconds to wait for NCCL to end a communicator, which has no timeout of its own; longer would block the publisher. It
took 0.5 s over sockets and up to 0.9 s between two GPUs, with a dead rank (bench/log/2026-11-28.md)."""
_UNWATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""No thread of torch's watches such a group. Its works are not waited for, which would block: the stream waits."""
_making = threading.Lock()
"""One at a time: changes of the environment by two threads at once would not be undone correctly."""


class Communicator:
    """A communicator with rank 0 as the trainer, formed at the first use on the buffer's device."""

    def __init__(self, store: KeyValueStore, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._group: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether NCCL has finished ending a communicator, if there was one to end."""
        return self._ended.is_set()

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Queues one broadcast from rank 0 on the current stream; returns its work. Raises TransportError when the
        communicator was aborted: another one would wait for ranks that are gone."""
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
        """A communicator that all ranks have joined. NCCL itself waits forever for one that is stopped meanwhile."""
        others = [f"transport rank {rank}" for rank in range(1, self._size)] if self._rank == 0 else ["the trainer"]
        try:
            if self._rank:
                self._store.reply(f"here/{self._rank}", b"", "the trainer", phase)
            else:
                for rank, who in enumerate(others, start=1):
                    self._store.take(f"here/{rank}", who, phase)
            return within(self._store.timeout_s, lambda: self._form(device, phase))
        except TimeoutError:
            self.abort()
            problem = f"{phase}: no communicator with {', '.join(others)} within {self._store.timeout_s:g} s"
            raise TransportError(problem) from None
        except RuntimeError:  # also TransportError
            self.abort()
            raise

    def _form(self, device: torch.device, phase: str) -> Any:
        """Runs in a thread that may be abandoned on timeout; it only touches memory of its own."""
        cuda.bind(device)
        with self._lock:
            self._opened(phase)
        group = _made(dist.PrefixStore("nccl", self._store.tcp), self._rank, self._size)
        self._keep(group, phase)
        stream = torch.cuda.Stream(device)
        first = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            one = torch.zeros(1, device=device)
            group.broadcast([one], from_trainer()).block_current_stream()
            first.record(stream)
        first.synchronize()
        self._keep(group, phase)
        return group

    def _keep(self, group: Any, phase: str) -> None:
        """Ends a communicator that was formed after this side was closed."""
        with self._lock:
            late = self._closed
            if not late:
                self._group = group
        if late:
            group.abort()
            raise TransportError(f"{phase}: closed")

    def finish(self, done: torch.cuda.Event, phase: str) -> None:
        """Waits for the work queued before `done`. Raises TransportError after aborting the communicator when that is
        late or failed, or when the sender is lost or this side was closed meanwhile: aborted work looks done."""
        now = time.monotonic()
        deadline = now + self._store.timeout_s
        look = now + _LOOK_S
        try:
            while not done.query():
                now = time.monotonic()
                if now > deadline:
                    raise TransportError(f"{phase}: a broadcast did not end within {self._store.timeout_s:g} s")
                if self._rank and now > look:
                    self._store.confirm("the trainer", phase, max(deadline - now, _LOOK_S))
                    look = time.monotonic() + _LOOK_S
                time.sleep(POLL_S)
            if self._closed:
                raise TransportError(f"{phase}: closed")
        except RuntimeError as error:
            self.abort()
            raise error if isinstance(error, TransportError) else TransportError(f"{phase}: {error}") from error

    def abort(self) -> None:
        """Ends the communicator without waiting for peers; there will be no other. If NCCL does not return in time, the
        thread is abandoned, and `ended` is set when it returns. Errors of NCCL are logged."""
        with self._lock:
            self._closed = True
            group, self._group = self._group, None
            if group is None:
                return
            self._ended.clear()  # before another closer can check it

        def end() -> None:
            try:
                group.abort()
            except RuntimeError as error:
                log.warning("transport rank %d: NCCL can't end a communicator: %s", self._rank, first_line(error))
            finally:
                self._ended.set()

        try:
            within(_END_S, end)
        except TimeoutError:
            log.warning("transport rank %d: NCCL has not ended a communicator within %g s", self._rank, _END_S)
        except RuntimeError:  # no thread can be started, as at interpreter shutdown: called here without a timeout
            end()


def load_kernels(device: torch.device, limit_s: float) -> None:
    """Loads NCCL's kernels once, by a communicator of one rank. Raises TransportError if that takes over `limit_s`."""
    try:
        within(limit_s, lambda: _load(device))
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(f"open: NCCL can't be used on {device}: {first_line(error)}") from None


@cache
def _load(device: torch.device) -> None:
    cuda.bind(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # an engine's own stream would wait
        alone = _made(dist.HashStore(), 0, 1)
        alone.allreduce([torch.zeros(1, device=device)]).block_current_stream()
        alone.abort()


def _made(store: dist.Store, rank: int, size: int) -> Any:
    with _making, _environment(_UNWATCHED):
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The process group reads these variables when it is made; the engine's own groups were made before."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)
