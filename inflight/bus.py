"""Control sockets between processes; the only module that imports zmq.

A Listener (ROUTER, binds) speaks with many Links (DEALER, connect), each with an identity. Per peer, messages arrive
in order and are never dropped silently: what can't be queued raises, a peer that went away is reported as Lost, and
frames that are no valid message are counted in `refused`. Each endpoint owns a thread that alone touches its socket, so
all methods may be called from any thread. Heartbeats run in that thread: they prove that the process lives, not that
it makes progress (phases have bounds of their own).
"""

from __future__ import annotations

import collections
import contextlib
import queue
import re
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Self, cast

import zmq

from inflight.config import BusConfig
from inflight.messages import MAX_FRAME_BYTES, AnyMessage, Heartbeat, WireError, decode, encode

MAX_QUEUED = 4096
"""Messages waiting on either side of a socket; more means that the peer, or our reader, has stopped reading."""
IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FIRST_CONTACT_S = 300.0
"""How long a Link waits for the first sign of a listener, whose process may still be starting."""
_LINGER_MS = 1000


class BusError(RuntimeError):
    """A message that can't be sent or an endpoint that is closed."""


class PeerLost(BusError):
    """The other side gave no sign of life for the configured time."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message and who sent it."""

    peer: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer that was silent for `dead_after_s`, or whose connection is gone."""

    peer: str


class _Endpoint:
    """What both ends share: the thread, the outgoing and incoming queues, and waking the thread to send."""

    def __init__(self, kind: int, config: BusConfig) -> None:
        self._config = config
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._outbox: collections.deque[tuple[str, bytes]] = collections.deque()
        self._inbox: queue.Queue[Any] = queue.Queue()  # of AnyMessage in a Link, of Received and Lost in a Listener
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._broken: BaseException | None = None
        self.refused = 0
        """Frames that were no valid message of this schema."""

    def _start(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=f"bus {name}", daemon=True)
        self._thread.start()

    def _queue(self, peer: str, frame: bytes) -> None:
        with self._lock:
            if self._closing.is_set() or self._broken is not None:
                raise BusError(f"bus endpoint is closed, message to {peer} not sent")
            if len(self._outbox) >= MAX_QUEUED:
                raise BusError(f"{peer} does not read: {MAX_QUEUED} messages are waiting")
            self._outbox.append((peer, frame))
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
            self._send_queued()
        except BaseException as error:  # noqa: BLE001 - kept and raised to whoever uses the endpoint
            self._broken = error
        finally:
            self._socket.close()

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

    def _decode(self, frame: bytes) -> AnyMessage | None:
        try:
            return decode(frame)
        except WireError:
            self.refused += 1
            return None

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
        return self._inbox.qsize() < MAX_QUEUED

    def _take(self, timeout_s: float) -> Any:
        """The oldest of what came in, or None when nothing did within `timeout_s`."""
        self._check()
        try:
            return self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _send_frame(self, peer: str, frame: bytes) -> None:
        raise NotImplementedError

    def _read_all(self) -> None:
        raise NotImplementedError

    def _tend(self, now: float) -> None:
        raise NotImplementedError


class Listener(_Endpoint):
    """The side that binds. `endpoint` is resolved: a `tcp://127.0.0.1:*` shows its port."""

    def __init__(self, endpoint: str, config: BusConfig) -> None:
        """Raises BusError when the address can't be bound."""
        super().__init__(zmq.ROUTER, config)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted process takes over its identity at once
        self._seen: dict[str, float] = {}
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise BusError(f"can't listen on {endpoint}: {error}") from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._start(endpoint)

    def send(self, peer: str, message: AnyMessage) -> None:
        """Queues a message. Raises BusError when the peer is not connected (never seen, or lost)."""
        self._check()
        if peer not in self._seen:
            raise BusError(f"{peer} is not connected, {type(message).__name__} not sent")
        self._queue(peer, encode(message))

    def receive(self, timeout_s: float) -> Received | Lost | None:
        """The next message or loss, or None when nothing came within `timeout_s`."""
        return cast("Received | Lost | None", self._take(timeout_s))

    def peers(self) -> set[str]:
        """Identities that are alive as far as known."""
        return set(self._seen)

    def _send_frame(self, peer: str, frame: bytes) -> None:
        try:
            self._socket.send_multipart([peer.encode(), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer)

    def _lose(self, peer: str) -> None:
        if self._seen.pop(peer, None) is not None:
            self._inbox.put(Lost(peer))

    def _read_all(self) -> None:
        while self._has_room():
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer = parts[0].decode("ascii", "replace")
            if len(parts) != 2 or not IDENTITY.fullmatch(peer):
                self.refused += 1
                continue
            message = self._decode(parts[1])
            if message is None:
                continue
            self._seen[peer] = time.monotonic()
            if isinstance(message, Heartbeat):
                with contextlib.suppress(zmq.Again):  # a peer with a full queue has enough to read
                    self._send_frame(peer, encode(Heartbeat()))
            else:
                self._inbox.put(Received(peer, message))

    def _tend(self, now: float) -> None:
        if not self._has_room():
            return  # heartbeats are waiting unread behind our own slow reader
        for peer in [p for p, seen in self._seen.items() if now - seen > self._config.dead_after_s]:
            self._lose(peer)


class Link(_Endpoint):
    """The side that connects, under an identity such as `g0.r1`."""

    def __init__(self, endpoint: str, identity: str, config: BusConfig, *, first_contact_s: float = FIRST_CONTACT_S):
        """Connects in the background. Raises BusError for an identity or address that can't be used."""
        super().__init__(zmq.DEALER, config)
        self._endpoint = endpoint
        self._next_beat = 0.0
        self._deadline = time.monotonic() + first_contact_s
        if not IDENTITY.fullmatch(identity):
            raise BusError(f"identity {identity!r} is not allowed: letters, digits, '.', '_' and '-', at most 64")
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise BusError(f"can't connect to {endpoint}: {error}") from None
        self._start(identity)

    def send(self, message: AnyMessage) -> None:
        """Queues a message for the listener."""
        self._queue(self._endpoint, encode(message))

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """The next message, or None when nothing came within `timeout_s`. Raises PeerLost when the listener is gone."""
        message: AnyMessage | None = self._take(timeout_s)
        if message is None and time.monotonic() > self._deadline:
            raise PeerLost(f"nothing heard from {self._endpoint} for too long")
        return message

    def _send_frame(self, peer: str, frame: bytes) -> None:
        self._socket.send(frame, zmq.NOBLOCK)

    def _read_all(self) -> None:
        while self._has_room():
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(frame)
            if message is None:
                continue
            self._deadline = time.monotonic() + self._config.dead_after_s
            if not isinstance(message, Heartbeat):
                self._inbox.put(message)

    def _tend(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat_s
            with contextlib.suppress(zmq.Again):
                self._socket.send(encode(Heartbeat()), zmq.NOBLOCK)
