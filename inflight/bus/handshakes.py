"""Counts failed connections to a listening socket: port scanners, other protocols, unknown keys."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from inflight.bus.refusals import Refusals

FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake not finished",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake of another protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "key not allowed",
}
NO_GREETING = "no greeting of ZeroMQ"
_OTHERS = (zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED)
AT_ONCE = 1024
"""Most events that are read in one go; the rest is read next time."""


class Handshakes:
    """Counts the events of zmq's monitor of one socket; used by the socket's thread alone.

    With CURVE enabled, zmq silently drops peers that do not send the ZMTP greeting; the monitor only reports a
    disconnect. Nor does it report which connection completed its handshake. So open handshakes are counted: a
    disconnect while one is open, without a reported failure, counts as that handshake's.
    """

    def __init__(self, socket: zmq.Socket[bytes], refusals: Refusals) -> None:
        self._socket = socket
        self._refusals = refusals
        self._events = socket.get_monitor_socket(sum(FAILED) + sum(_OTHERS))
        self._open = 0
        """Connections whose handshake is neither completed nor ended by a disconnect."""
        self._failed = 0
        """Of these, the ones whose failure was reported and whose disconnect is still to come."""

    def read(self) -> None:
        """Reads the events since the last call, without waiting."""
        for _ in range(AT_ONCE):
            if not self._events.poll(0):
                return
            self._take(zmq.Event(recv_monitor_message(self._events, zmq.NOBLOCK)["event"]))

    def _take(self, event: zmq.Event) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._open += 1
        elif event in FAILED:
            self._failed += 1
            self._refuse(FAILED[event])
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._open = max(0, self._open - 1)
        elif self._failed:
            self._failed -= 1
            self._open = max(0, self._open - 1)
        elif self._open:
            self._open -= 1
            self._refuse(NO_GREETING)

    def _refuse(self, reason: str) -> None:
        self._refusals.add("a stranger", reason)

    def close(self) -> None:
        """Must be called before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close()
