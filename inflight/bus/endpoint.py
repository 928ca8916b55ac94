"""What both ends of a control socket share: the thread, the queues and their bounds, and what is refused."""

from __future__ import annotations

import collections
import contextlib
import queue
import re
import socket
import threading
import time
from typing import Any, Self

import zmq

from inflight.bus.refusals import Refusals
from inflight.config import BusConfig
from inflight.messages import MAX_FRAME_BYTES, AnyMessage, WireError, decode

MAX_QUEUED = 4096
"""Messages waiting on either side of a socket; more means that the peer, or our reader, has stopped reading."""
MAX_QUEUED_BYTES = 256 << 20
"""The same in bytes; one message may go beyond it."""
READ_AT_ONCE = 1024
"""Messages that are read before others are sent and heartbeats looked at: a peer that floods us must not keep us from
that."""
HIGH_WATER = 64
"""Messages that zmq itself holds for a connection, each way; beyond, the other side has to wait."""
IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TAIL = b"#"
"""Between a peer's identity and the random part of what zmq knows its connection by. zmq hands over what is for a name
to whoever connects under it, before any message is looked at: so it must be one that nobody else can know."""
_LINGER_MS = 1000


class BusError(RuntimeError):
    """A message that can't be sent or an endpoint that is closed."""


class PeerLost(BusError):
    """The other side gave no sign of life for the configured time."""


class Endpoint:
    """What both ends share: the thread, the outgoing and incoming queues, and waking the thread to send."""

    def __init__(self, kind: int, name: str, config: BusConfig) -> None:
        self._config = config
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set_hwm(HIGH_WATER)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._outbox: collections.deque[tuple[str, bytes]] = collections.deque()
        self._inbox: queue.Queue[tuple[Any, int]] = queue.Queue()
        """What came (AnyMessage in a Link, Received and Lost in a Listener) with its bytes on the wire."""
        self._bytes_out = self._bytes_in = 0
        """Bytes of both queues."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._broken: BaseException | None = None
        self.refusals = Refusals(name)
        """What was not taken, by reason."""

    @property
    def refused(self) -> int:
        """Frames and connections that were not taken."""
        return self.refusals.total

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
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            self._wake_in.send(b"w")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                reading = zmq.POLLIN if self._has_room() else 0
                poller.register(self._socket, reading)
                poller.poll(max(1, round(self._config.heartbeat_s * 250)))
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
                self._send_queued()
                if reading:
                    self._read_all()
                self._tend(time.monotonic())
            self._send_last()
        except BaseException as error:  # noqa: BLE001 - kept and raised to whoever uses the endpoint
            self._broken = error
        finally:
            self._free()

    def _send_queued(self) -> None:
        """Sends what the socket takes now; what it does not take stays, in order."""
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
        """What is queued at the end; waits a little for a peer that must read before it can take more."""
        deadline = time.monotonic() + _LINGER_MS / 1000
        self._send_queued()
        while self._outbox and time.monotonic() < deadline:
            time.sleep(0.01)
            self._send_queued()

    def _decode(self, peer: str, frame: bytes) -> AnyMessage | None:
        try:
            return decode(frame)
        except WireError as error:
            self.refusals.add(peer, "no valid message", str(error))
            return None

    def _put(self, item: Any, nbytes: int) -> None:
        with self._lock:
            self._bytes_in += nbytes
        self._inbox.put((item, nbytes))

    def _free(self) -> None:
        """Ends what the thread alone may touch."""
        self._socket.close()

    def close(self) -> None:
        """Sends what is queued (bounded), stops the thread and frees the socket. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"c")
        self._thread.join(timeout=5)
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
        """The oldest of what came in, or None when nothing did within `timeout_s`."""
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
