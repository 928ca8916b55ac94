"""The side of a control socket that binds."""

from __future__ import annotations

import collections
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import zmq
from zmq.auth.thread import ThreadAuthenticator

from inflight.bus import keys
from inflight.bus.allowed import AllowedKeys
from inflight.bus.claim import AddressClaim, ClaimError
from inflight.bus.endpoint import IDENTITY, READ_AT_ONCE, TAIL, BusError, Endpoint
from inflight.bus.handshakes import Handshakes
from inflight.bus.rate import MAX_PEERS, Rate
from inflight.config import BusConfig
from inflight.messages import AnyMessage, ClockOffset, Goodbye, Heartbeat, Refused, encode

KNOWN_EACH = 16
"""Of each name, the newest connections that are remembered."""
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 900, zmq.TCP_KEEPALIVE_INTVL: 60, zmq.TCP_KEEPALIVE_CNT: 3}
"""A connection whose other host is gone ends after 18 min. A listener only answers, so that TCP has nothing to transmit
again, and would keep it, with a file descriptor, for the whole run. By then the TCP of the other side has given up what
it had to send (15 min, tcp_retries2), so nothing is lost that was not before."""
HANDSHAKE_S = 10.0
"""Seconds within which a connection has to be identified; one that is not holds a file descriptor until then. ZeroMQ's
own bound is 30 s."""


@dataclass(slots=True)
class _Peer:
    """A connection on which a peer was heard, and when."""

    address: bytes
    """Its routing id in zmq: the peer's name and the suffix that its Link has added."""
    seen: float
    """When, in the listener's `_listened_s`."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message and its sender."""

    peer: str
    message: AnyMessage
    nbytes: int = field(default=0, compare=False)
    """Its size on the wire, in bytes."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer has said goodbye, was silent for `dead_after_s`, or its connection was closed."""

    peer: str
    asked: bool = False
    """The peer said goodbye because it was asked to end."""


class Listener(Endpoint):
    """The side that binds. `endpoint` is resolved: a `tcp://127.0.0.1:*` shows its port."""

    def __init__(self, endpoint: str, config: BusConfig, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` is this host's, with Unix time in seconds.

        Raises BusError when the address can't be bound, another process listens on it, or other hosts can reach it and
        there are no keys.
        """
        super().__init__(zmq.ROUTER, endpoint, config, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
        for option, value in KEEPALIVE.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # for a Link that reconnects after its connection broke
        self._peers: dict[str, _Peer] = {}
        self._clock = clock
        self._id = secrets.token_hex(8)
        self._offsets: dict[str, ClockOffset] = {}
        self._known: dict[str, collections.deque[bytes]] = {}
        """Name → connections on which it was heard, in the order of their first message."""
        self._rate = Rate()
        self._authenticator: ThreadAuthenticator | None = None
        self._allowed: AllowedKeys | None = None
        """None: no keys are used."""
        self._handshakes = Handshakes(self._socket, self.refusals)
        self._claim: AddressClaim | None = None
        with self._opening(f"listen on {endpoint}", zmq.ZMQError, keys.KeysError, ClaimError, OSError):
            if keys.needed(endpoint) and not config.keys:
                raise BusError(f"{endpoint} can be reached by other hosts: it needs keys (bus.keys)")
            if config.keys:
                self._allowed = AllowedKeys(Path(config.keys))
                keys.guard(self._socket, Path(config.keys))
                self._authenticator = ThreadAuthenticator(self._context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._allowed)
            self._claim = AddressClaim(endpoint)
            self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._start(endpoint)

    def send(self, peer: str, message: AnyMessage) -> None:
        """Queues a message. Raises BusError when the peer is not connected (never seen, or lost)."""
        self._check()
        if peer not in self._peers:
            raise BusError(f"{peer} is not connected, {type(message).__name__} not sent")
        self._queue(peer, encode(message))

    def receive(self, timeout_s: float) -> Received | Lost | None:
        """The next message or loss, or None when nothing came within `timeout_s`."""
        return cast("Received | Lost | None", self._take(timeout_s))

    def peers(self) -> set[str]:
        """Identities of the peers that are presumed alive."""
        return set(self._peers)

    def offsets(self) -> dict[str, ClockOffset]:
        """Peer → how far this host's clock is ahead of its host's, of those that have measured it."""
        return dict(self._offsets)

    def _send_frame(self, peer: str, frame: bytes) -> None:
        """Sends to the peer's latest connection; a frame for a peer that was lost meanwhile is discarded."""
        if peer not in self._peers:
            return
        try:
            self._socket.send_multipart([self._peers[peer].address, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer)

    def _lose(self, peer: str, *, asked: bool = False) -> None:
        self._offsets.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._put(Lost(peer, asked), 0)

    def _read_all(self) -> None:
        for _ in range(READ_AT_ONCE):
            if not self._has_room():
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            address = parts[0].bytes
            peer = address.partition(TAIL)[0].decode("ascii", "replace")
            if len(parts) != 2 or not IDENTITY.fullmatch(peer):
                self.refusals.add(repr(peer[:64]), "no identity, or not one frame")
            elif not self._owns(parts[1], peer):
                self.refusals.add(peer, "under a name that its key does not own")
            elif not self._rate.allows(peer):
                self.refusals.add(peer, "too many messages")
            else:
                self._read(peer, address, parts[1].bytes)

    def _read(self, peer: str, address: bytes, frame: bytes) -> None:
        message = self._decode(peer, frame)
        if message is None:
            return
        if isinstance(message, Goodbye):
            if peer in self._peers and self._peers[peer].address == address:  # else a newer process has this name
                self._lose(peer, asked=message.asked)
            return
        if self._is_replaced(peer, address):
            self._refuse(peer, address)
            return
        self._peers[peer] = _Peer(address, self._listened_s)
        if isinstance(message, Heartbeat):
            # A full queue proves life without a heartbeat; a closed peer may have sent more, and its goodbye, before.
            answer = Heartbeat(sent=self._clock(), answers=message.sent, listener=self._id)
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([address, encode(answer)], zmq.NOBLOCK)
            if message.offset is not None:
                self._offsets[peer] = message.offset
        else:
            self._put(Received(peer, message, len(frame)), len(frame))

    def _is_replaced(self, peer: str, address: bytes) -> bool:
        """Whether a later process has this name: a suspended one that wakes up must not be mistaken for it."""
        known = self._known.setdefault(peer, collections.deque(maxlen=KNOWN_EACH))
        if address not in known:
            known.append(address)
        if len(self._known) > MAX_PEERS:
            del self._known[next(name for name in self._known if name != peer)]
        return known[-1] != address

    def _refuse(self, peer: str, address: bytes) -> None:
        reason = "another process has taken its place"
        self.refusals.add(peer, reason)
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([address, encode(Refused(reason=reason))], zmq.NOBLOCK)

    def _owns(self, frame: zmq.Frame, peer: str) -> bool:
        """Whether a message came with the key of the process that it names; True if no keys are used."""
        if self._allowed is None:
            return True
        return self._allowed.owner_of(str(frame.get("User-Id"))) == keys.name_of(peer)

    def _free(self) -> None:
        self._handshakes.close()
        self._socket.close()
        if self._claim is not None:
            self._claim.release()
        if self._authenticator is not None:
            self._authenticator.stop()

    def _tend(self, now: float) -> None:
        self._handshakes.read()
        if not self._has_room():
            return  # heartbeats may be unread behind our own slow reader
        silent_since = self._listened_s - self._config.dead_after_s
        for peer in [name for name, each in self._peers.items() if each.seen < silent_since]:
            self._lose(peer)
