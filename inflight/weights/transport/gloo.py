"""Bytes on CPU: gloo broadcasts of one bucket after another, from rank 0 (the trainer) to the ranks of one generator.

The group is this transport's own: the default group, which belongs to the engine, is neither needed nor touched. It is
formed at the first transfer, so making either side never waits. Its members meet at a store on a loopback port of the
trainer's process, one for all groups: the store outlives the groups, so that a late rank finds its group closed instead
of no store (torch's client retries a missing store for longer than its timeout).

An operation that has begun can't be interrupted from this side: it ends when the peers took part, when a peer closed
or died (at once: its sockets close), or by the timeout. So a rank that can't take part must close its receiver.
Everything that waits does so without the GIL.
"""

from __future__ import annotations

import functools
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inflight.messages import BucketMeta
from inflight.weights.transport.base import TransportError, first_line, from_trainer
from inflight.weights.transport.rendezvous import LOOPBACK, hosted, joined
from inflight.weights.transport.timeout import within

_BACKSTOP_S = 5.0
"""Seconds beyond gloo's own timeout of each operation; should never be reached."""
_POLL_S = 0.002
_CLOSED, _GO = "closed", "go"
"""Keys by which the trainer announces that a group will not, or will now, be formed."""


class _Group:
    """The process group of one side: formed late, dropped on the first error, closable from any thread."""

    def __init__(self, rank: int, size: int, timeout_s: float, store: Callable[[], dist.Store]) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._store: Callable[[], dist.Store] | None = store
        self._group: Any = None
        self._closed = threading.Event()
        self._busy = threading.Lock()

    def transfer(self, phase: str, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Broadcasts each bucket's slice of `buffer`. Raises TransportError naming phase and bucket."""
        with self._busy:
            step = "connecting"
            group = work = None
            try:
                self._require_open()
                if self._group is None:  # a suspended store never answers, and its client never gives up
                    self._group = within(self._timeout_s + _BACKSTOP_S, self._formed)
                group = self._group
                for index, bucket in enumerate(buckets):
                    step = f"bucket {index} of {len(buckets)}"
                    self._require_open()
                    work = group.broadcast([buffer[bucket.offset : bucket.offset + bucket.nbytes]], from_trainer())
                    work.wait(timedelta(seconds=self._timeout_s + _BACKSTOP_S))
            except (RuntimeError, OSError) as error:  # also DistStoreError and DistNetworkError
                self._closed.set()
                raise TransportError(f"{phase}, {step}: {_what(error)}") from None
            finally:
                group = work = None  # or the error's traceback would keep the sockets open
                if self._closed.is_set():
                    self._drop()

    def close(self) -> None:
        """Prevents further operations; sockets close now or, during an operation, when it ends."""
        self._closed.set()
        if self._busy.acquire(blocking=False):
            self._drop()
            self._busy.release()

    def _drop(self) -> None:
        """Closes the group's sockets, which notifies peers in a transfer, and notifies those that wait to begin one."""
        self._group = None
        store, self._store = self._store, None
        if store is not None and self._rank == 0:
            # Must not raise here; ranks that wait for this key end by the timeout.
            with suppress(OSError, RuntimeError):
                store().set(_CLOSED, "1")

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("closed")

    def _formed(self) -> Any:
        assert self._store is not None, "an open group has its store"
        store = self._store()
        self._meet(store)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # the constructor without options would select a network device by host name
        options._timeout = timedelta(seconds=self._timeout_s)
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._threads = 1
        return gloo(store, self._rank, self._size, options)

    def _meet(self, store: dist.Store) -> None:
        """Waits until every rank is at the store, so that an error can name the missing ones, and for the trainer's
        confirmation, after which it is certain to take part in forming the group."""
        store.set(f"here/{self._rank}", "1")
        others = [f"here/{rank}" for rank in range(1, self._size)] if self._rank == 0 else [_GO]
        deadline = time.monotonic() + self._timeout_s
        while missing := [key for key in others if not store.check([key])]:
            self._require_open()
            if store.check([_CLOSED]):
                raise RuntimeError("the trainer has closed it")
            if time.monotonic() > deadline:
                who = ", ".join(key.partition("/")[2] for key in missing) if self._rank == 0 else "others"
                raise RuntimeError(f"transport ranks {who} did not come within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        if self._rank == 0:
            store.set(_GO, "1")


class GlooSender:
    """Trainer side, rank 0 of `size`; see transport.base.Sender."""

    def __init__(self, size: int, timeout_s: float) -> None:
        """Raises TransportError when this process can't host a store."""
        port, token = _store_of_this_process()[0], secrets.token_hex(8)
        self.rendezvous = f"{LOOPBACK}:{port}/{token}"
        """Address of the store, and the prefix of this group's keys in it."""
        # A connection of its own: a group that waits blocks its connection, which must not block the others.
        self._group = _Group(0, size, timeout_s, functools.partial(_connect, port, token, timeout_s))

    def send(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Broadcasts bucket by bucket; the first call waits for all receivers to join."""
        self._group.transfer("send", buffer, buckets)

    def close(self) -> None:
        """See the module: an operation in flight ends by itself, within the timeout."""
        self._group.close()


class GlooReceiver:
    """Rank side; see transport.base.Receiver."""

    def __init__(self, rendezvous: str, rank: int, size: int, timeout_s: float) -> None:
        """Raises TransportError for a rendezvous that can't be read; connects at the first `receive`."""
        address, _, token = rendezvous.partition("/")
        host, _, port = address.rpartition(":")
        if host != LOOPBACK or not port.isdecimal() or not token:
            raise TransportError(f"connect: rendezvous {rendezvous!r} is not {LOOPBACK}:port/token")

        self._group = _Group(rank, size, timeout_s, functools.partial(_connect, int(port), token, timeout_s))

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Fills `buffer` bucket by bucket. After an error nothing writes into it any more."""
        self._group.transfer("receive", buffer, buckets)

    def close(self) -> None:
        """See the module: an operation in flight ends by itself, within the timeout."""
        self._group.close()


@functools.cache
def _store_of_this_process() -> tuple[int, dist.Store]:
    """(port, store): made with the first sender, kept until exit. Raises TransportError when it can't be opened."""
    try:
        return hosted()
    except (OSError, RuntimeError) as error:
        raise TransportError(f"open: no store on {LOOPBACK}: {_what(error)}") from None


def _connect(port: int, token: str, timeout_s: float) -> dist.Store:
    """A connection to the trainer's store, which exists as long as the trainer; it sees one group's keys."""
    return dist.PrefixStore(token, joined(LOOPBACK, port, timeout_s))


def _what(error: Exception) -> str:
    """The message of an error, without gloo's source position and advice."""
    line = re.sub(r"^\[/[^\]]*\] ", "", first_line(error))
    return line.partition(". This is typically caused")[0]
