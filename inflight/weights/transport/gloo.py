"""Bytes on CPU: gloo broadcasts of one bucket after another, from rank 0 (the trainer) to the ranks of one generator.

The group is this transport's own: the default group, which belongs to the engine, is neither needed nor touched. It is
formed at the first transfer, so making either side never waits. Its members meet at a store of the trainer's process,
for all groups (meeting.py), which is closed when all are formed. A group that is given up before leaves it open, so
that a late rank finds its group closed instead of no store.

An operation that has begun can't be interrupted from this side: it ends when the peers took part, when a peer closed
or died (at once: its sockets close), or by the timeout. So a rank that can't take part must close its receiver.
Everything that waits does so without the GIL.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inflight.config.network import NetworkConfig
from inflight.error_line import first_line
from inflight.messages import BucketMeta
from inflight.weights.transport.base import TransportError, from_trainer
from inflight.weights.transport.meeting import MeetingStore
from inflight.weights.transport.rendezvous import HERE, connected, split
from inflight.weights.transport.timeout import within

_BACKSTOP_S = 5.0
"""Seconds beyond gloo's own timeout of each operation; should never be reached."""
_POLL_S = 0.002
_CLOSED = "closed"
_GO = "go"
"""Keys by which the trainer announces that a group will not, or will now, be formed."""


class _Group:
    """The process group of one side: formed late, dropped on the first error, closable from any thread."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        store: Callable[[], dist.Store],
        network: NetworkConfig,
        settled: Callable[[bool], None] = lambda formed: None,
    ) -> None:
        """`store` connects with the store at which the group is formed; `settled` is called with True when no rank
        needs that any more, or with False when the group will not be formed."""
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._network = network
        self._settled = settled
        self._store: Callable[[], dist.Store] | None = store
        """None: the group is formed, or will not be."""
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
                    piece = buffer[bucket.offset : bucket.offset + bucket.nbytes]
                    if self._rank == 0:
                        piece = piece.cpu()  # a sender's buffer is on a GPU where other generators have theirs
                    work = group.broadcast([piece], from_trainer())
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
            self._settled(False)

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
        options._devices = [gloo.create_device(hostname=self._network.address)]
        options._threads = 1
        group = gloo(store, self._rank, self._size, options)
        self._confirm(store)
        return group

    def _confirm(self, store: dist.Store) -> None:
        """Tells the trainer that this rank needs the store no more; the trainer waits for all ranks: two others may
        still look each other up in it."""
        if self._rank:
            store.set(f"formed/{self._rank}", "1")
        else:
            self._await(store, [f"formed/{rank}" for rank in range(1, self._size)], "form the group")
        self._store = None
        self._settled(True)

    def _meet(self, store: dist.Store) -> None:
        """Waits until every rank is at the store, so that an error can name the missing ones, and for the trainer's
        confirmation, after which it is certain to take part in forming the group."""
        store.set(f"here/{self._rank}", "1")
        self._await(store, [f"here/{rank}" for rank in range(1, self._size)] if self._rank == 0 else [_GO], "come")
        if self._rank == 0:
            store.set(_GO, "1")

    def _await(self, store: dist.Store, keys: list[str], what: str) -> None:
        """Waits until the keys are there. Raises RuntimeError, within the timeout, naming the ranks that did not do
        `what`."""
        deadline = time.monotonic() + self._timeout_s
        while missing := [key for key in keys if not store.check([key])]:
            self._require_open()
            if store.check([_CLOSED]):
                raise RuntimeError("the trainer has closed it")
            if time.monotonic() > deadline:
                who = ", ".join(key.partition("/")[2] for key in missing) if self._rank == 0 else "others"
                raise RuntimeError(f"transport ranks {who} did not {what} within {self._timeout_s:g} s")
            time.sleep(_POLL_S)


class GlooSender:
    """Trainer side, rank 0 of `size`; see transport.base.Sender."""

    follows = False

    def __init__(self, size: int, timeout_s: float, network: NetworkConfig = HERE) -> None:
        """Raises TransportError when this process can't host a store."""
        meeting = _meeting_of_this_process(network)
        self.rendezvous = meeting.expect()
        """Address of the store, and the prefix of this group's keys in it."""
        # A connection of its own: a group that waits blocks its connection, which must not block the others.
        connect = functools.partial(_connect, *split(self.rendezvous), timeout_s)
        settled = functools.partial(meeting.settle, self.rendezvous)
        self._group = _Group(0, size, timeout_s, connect, network, settled)

    def send(self, buffer: torch.Tensor, buckets: list[BucketMeta], packed: Iterable[int] = ()) -> None:
        """Broadcasts bucket by bucket; the first call waits for all receivers to join."""
        self._group.transfer("send", buffer, buckets)

    def close(self) -> None:
        """See the module: an operation in flight ends by itself, within the timeout."""
        self._group.close()


class GlooReceiver:
    """Rank side; see transport.base.Receiver."""

    def __init__(self, rendezvous: str, rank: int, size: int, timeout_s: float, network: NetworkConfig = HERE) -> None:
        """Raises TransportError for a rendezvous that can't be read; connects at the first `receive`."""
        try:
            place, token = split(rendezvous)
        except ValueError as error:
            raise TransportError(f"connect: rendezvous: {error}") from None
        self._group = _Group(rank, size, timeout_s, functools.partial(_connect, place, token, timeout_s), network)

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Fills `buffer` bucket by bucket. After an error nothing writes into it any more."""
        self._group.transfer("receive", buffer, buckets)

    def close(self) -> None:
        """See the module: an operation in flight ends by itself, within the timeout."""
        self._group.close()


@functools.cache
def _meeting_of_this_process(network: NetworkConfig) -> MeetingStore:
    return MeetingStore(network)


def _connect(place: str, token: str, timeout_s: float) -> dist.Store:
    """A connection to the trainer's store; it sees one group's keys."""
    return dist.PrefixStore(token, connected(place, timeout_s))


def _what(error: Exception) -> str:
    """The message of an error, without gloo's source position and advice."""
    line = re.sub(r"^\[/[^\]]*\] ", "", first_line(error))
    return line.partition(". This is typically caused")[0]
