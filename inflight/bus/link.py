"""The side of a control socket that connects."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

import zmq

from inflight.bus import keys
from inflight.bus.endpoint import IDENTITY, READ_AT_ONCE, TAIL, BusError, Endpoint, PeerLost
from inflight.bus.round_trips import RoundTrips
from inflight.config import BusConfig
from inflight.messages import AnyMessage, Goodbye, Heartbeat, encode

FIRST_CONTACT_S = 300.0
"""Seconds for which a Link waits for the first heartbeat of a listener, whose process may still be starting."""


class Link(Endpoint):
    """The side that connects, under an identity such as `g0.r1`."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        config: BusConfig,
        *,
        first_contact_s: float = FIRST_CONTACT_S,
    ) -> None:
        """Connects in the background. Raises BusError for an invalid identity or address."""
        if not IDENTITY.fullmatch(identity):
            raise BusError(f"identity {identity!r} is not allowed: letters, digits, '.', '_' and '-', at most 64")
        super().__init__(zmq.DEALER, identity, config, endpoint)
        self._endpoint = endpoint
        self._next_beat = 0.0
        self._trips = RoundTrips(time.time)
        self._leaving = False
        self.listener = ""
        """Which listener has answered last; empty: none has. It changes when another one takes the address."""
        self._deadline = first_contact_s
        """Of the listener's silence, in `_listened_s`."""
        with self._opening(f"connect to {endpoint}", zmq.ZMQError, keys.KeysError):
            self._socket.setsockopt(zmq.IDENTITY, identity.encode() + TAIL + secrets.token_hex(16).encode())
            if keys.needed(endpoint) and not config.keys:
                raise keys.KeysError("it may lead to another host and needs keys (bus.keys)")
            if config.keys:
                keys.identify(self._socket, identity, Path(config.keys))
            self._socket.connect(endpoint)
        self._start(identity)

    def send(self, message: AnyMessage) -> None:
        """Queues a message for the listener."""
        self._queue(self._endpoint, encode(message))

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """The next message, or None when nothing came within `timeout_s`. Raises PeerLost when the listener is gone."""
        message: AnyMessage | None = self._take(timeout_s)
        if message is None and self._listened_s > self._deadline:
            raise PeerLost(f"nothing heard from {self._endpoint} for too long")
        return message

    def close(self, *, asked: bool = False) -> None:
        """Sends a goodbye, so that the listener need not wait for the timeout of this peer; then closes as any
        endpoint. `asked`: this process was asked to end.

        If the listener has not read more than HIGH_WATER messages by then, zmq may drop the last ones with the
        connection: messages that must arrive need an acknowledgement.
        """
        self._leaving = True
        with contextlib.suppress(BusError):  # already closed, or the listener does not read
            self.send(Goodbye(asked=asked))
        super().close()

    def _send_frame(self, peer: str, frame: bytes) -> None:
        self._socket.send(frame, zmq.NOBLOCK)

    def _read_all(self) -> None:
        for _ in range(READ_AT_ONCE):
            if not self._has_room():
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode("the listener", frame)
            if message is None:
                continue
            self._deadline = self._listened_s + self._config.dead_after_s
            if not isinstance(message, Heartbeat):
                self._put(message, len(frame))
            elif message.answers:
                self._trips.answered(message.answers, message.sent)
                self.listener = message.listener or self.listener

    def _tend(self, now: float) -> None:
        if now >= self._next_beat and not self._leaving:  # a heartbeat after the goodbye would look like a new peer
            self._next_beat = now + self._config.heartbeat_s
            with contextlib.suppress(zmq.Again):
                beat = Heartbeat(sent=self._trips.now(), offset=self._trips.best)
                self._socket.send(encode(beat), zmq.NOBLOCK)
