"""The common part of both sides of a control socket: the thread, the queues and their limits, and refusals."""

from __future__ import annotations

import collections
import contextlib
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import zmq

from inflight.bus.refusals import Refusals
from inflight.config import BusConfig
from inflight.error_line import one_line
from inflight.messages import MAX_FRAME_BYTES, AnyMessage, WireError, decode

MAX_QUEUED = 4096
"""Most messages waiting on either side of a socket; more means that the peer, or our reader, has stopped reading."""
MAX_QUEUED_BYTES = 256 << 20
"""Most bytes waiting; a single message may exceed it."""
READ_AT_ONCE = 1024
"""Most messages read in one go, before sending and heartbeats have their turn again: a flooding peer must not block
those."""
HIGH_WATER = 64
"""Messages that zmq itself queues for a connection, each way; beyond that the sender has to wait."""
IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TAIL = b"#"
"""Separates a peer's identity from the random part of its routing id in zmq. zmq delivers messages for an id to any
connection that uses it, before any message is checked, so the id must be one that no other process can guess."""
_LINGER_MS = 1000


class BusError(RuntimeError):
    """A message can't be sent, or the endpoint is closed."""


class PeerLost(BusError):
    """Nothing was received from the other side for the configured time."""


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """zmq's context, freed by its endpoint alone. Its own finalizer waits for all sockets to be closed, which in a
    garbage collection, whichever thread runs it, would never end for an endpoint that was not closed."""

    def __del__(self) -> None:
        """Leaves the context to the end of the process."""


def _nothing() -> None:
    """Nothing is called: a thread waits in `receive`."""


class Endpoint:
    """The common part of Link and Listener: the thread, the outgoing and incoming queues, and waking the thread."""

    def __init__(self, kind: int, name: str, config: BusConfig, endpoint: str) -> None:
        self._config = config
        self._context = _Context(io_threads=1)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._outbox: collections.deque[tuple[str, bytes]] = collections.deque()
        self._inbox: queue.Queue[tuple[Any, int]] = queue.Queue()
        """Received items (AnyMessage in a Link, Received and Lost in a Listener), each with its size in bytes."""
        self._bytes_out = self._bytes_in = 0
        """Total bytes of the messages in each queue."""
        self._lock = threading.Lock()
        self._listened_s = 0.0
        """The time by which silence is measured: seconds for which the thread has read what came. Time in which it
        could not is no peer's silence: this process was suspended, native code held the GIL, or the queue was full."""
        self._closing = threading.Event()
        self._broken: BaseException | None = None
        self.arrived: Callable[[], None] = _nothing
        """Called by the endpoint's thread after each item that it has received, and when the thread ends by an error;
        must neither block nor raise."""
        self.refusals = Refusals(name)
        """Input that was refused, by reason."""

    @contextlib.contextmanager
    def _opening(self, doing: str, *refusals: type[Exception]) -> Iterator[None]:
        """Around what a constructor does with the socket: when it fails, all is freed, as the caller has no object to
        close. `refusals` are raised as BusError, which says what the endpoint was `doing`."""
        try:
            yield
        except BaseException as error:
            self._free()
            self._dispose()
            if isinstance(error, refusals):
                raise BusError(f"can't {doing}: {error}") from None
            raise

    def _start(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=f"bus {name}", daemon=True)
        self._thread.start()

    def _queue(self, peer: str, frame: bytes) -> None:
        with self._lock:
            if self._closing.is_set() or self._broken is not None:
                raise BusError(f"bus endpoint is closed, message to {peer} not sent")
            if len(self._outbox) >= MAX_QUEUED or self._bytes_out >= MAX_QUEUED_BYTES:
                raise BusError(f"{peer} does not read: {len(self._outbox)} messages, {self._bytes_out} bytes wait")
            self._outbox.append((peer, frame))
            self._bytes_out += len(frame)
        try:
            self._wake_in.send(b"w")
        except BlockingIOError:  # a full pipe wakes the thread as well
            pass
        except OSError:
            raise BusError(f"bus endpoint is closed, message to {peer} not sent") from None

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        before = time.monotonic()
        try:
            while not self._closing.is_set():
                reading = zmq.POLLIN if self._has_room() else 0
                poller.register(self._socket, reading)
                poller.poll(max(1, round(self._config.heartbeat_s * 250)))
                now = time.monotonic()
                if reading:
                    self._listened_s += min(now - before, self._config.heartbeat_s)
                before = now
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
                self._send_queued()
                if reading:
                    self._read_all()
                self._tend(time.monotonic())
            self._send_last()
        except BaseException as error:  # noqa: BLE001 - stored, and raised by the next call of a method
            self._broken = error
            self.arrived()
        finally:
            self._free()

    def _send_queued(self) -> None:
        """Sends what the socket accepts now; the rest stays queued, in order."""
        with self._lock:
            waiting, self._outbox = self._outbox, collections.deque()
        stuck: set[str] = set()
        kept: list[tuple[str, bytes]] = []
        for peer, frame in waiting:
            if peer not in stuck:
                try:
                    self._send_frame(peer, frame)
                    continue
                except zmq.Again:
                    stuck.add(peer)
            kept.append((peer, frame))
        with self._lock:
            self._outbox.extendleft(reversed(kept))
            self._bytes_out = sum(len(frame) for _, frame in self._outbox)

    def _send_last(self) -> None:
        """Sends the rest of the queue on closing; waits briefly for a peer that must read before it accepts more."""
        deadline = time.monotonic() + _LINGER_MS / 1000
        self._send_queued()
        while self._outbox and time.monotonic() < deadline:
            time.sleep(0.01)
            self._send_queued()

    def _decode(self, peer: str, frame: bytes) -> AnyMessage | None:
        try:
            return decode(frame)
        except WireError as error:
            self.refusals.add(peer, "no valid message", one_line(error))
            return None

    def _put(self, item: Any, nbytes: int) -> None:
        with self._lock:
            self._bytes_in += nbytes
        self._inbox.put((item, nbytes))
        self.arrived()

    def _free(self) -> None:
        """Frees objects that only the thread may use."""
        self._socket.close()

    def close(self) -> None:
        """Sends what is queued (within a timeout), stops the thread and frees the socket. A second call does
        nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"c")
        self._thread.join(timeout=5)
        self._dispose()

    def _dispose(self) -> None:
        """Frees what is left when the socket is closed, or will be. The context waits for that, in a thread."""
        threading.Thread(target=self._context.term, name="bus term", daemon=True).start()
        self._wake_in.close()
        self._wake_out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._broken is not None:
            raise BusError(f"bus thread ended: {self._broken!r}")

    def _has_room(self) -> bool:
        return self._inbox.qsize() < MAX_QUEUED and self._bytes_in < MAX_QUEUED_BYTES

    def _take(self, timeout_s: float) -> Any:
        """The oldest received item, or None after `timeout_s`. Raises BusError when the thread has ended."""
        self._check()
        try:
            item, nbytes = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        with self._lock:
            self._bytes_in -= nbytes
        return item

    def _send_frame(self, peer: str, frame: bytes) -> None:
        raise NotImplementedError

    def _read_all(self) -> None:
        raise NotImplementedError

    def _tend(self, now: float) -> None:
        raise NotImplementedError
