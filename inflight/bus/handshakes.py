"""Connections to a listening socket that never became one: port scanners, other protocols, unknown keys."""

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
"""Events that are read in one go; the rest waits for the next."""


class Handshakes:
    """Counts what zmq's monitor tells of one socket; used by the socket's thread alone.

    Where keys are asked for, zmq drops who begins without its greeting and says no more than that somebody has left.
    It does not say either whose handshake has succeeded. So the open ones are counted: who leaves while there is one,
    without a failure that was told, has left from there.
    """

    def __init__(self, socket: zmq.Socket[bytes], refusals: Refusals) -> None:
        self._socket, self._refusals = socket, refusals
        self._events = socket.get_monitor_socket(sum(FAILED) + sum(_OTHERS))
        self._open = 0
        """Connections whose handshake has neither succeeded nor ended with them."""
        self._failed = 0
        """Of those the ones whose failure was told, and that are about to leave."""

    def read(self) -> None:
        """Takes what has been told since the last call; waits for nothing."""
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
        """Before the socket is."""
        self._socket.disable_monitor()
        self._events.close()
