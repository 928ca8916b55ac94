"""The publisher's thread: reads the socket, watches the clock, and drives the protocol.

Every generator has a transport and a sending thread of its own (channel.py), so one that is late, fails or dies delays
no other. One lock guards all replicas; messages are queued while it is held, so each peer sees them in the order of the
states.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

from inflight.bus import Listener, Lost, Received
from inflight.messages import Finish
from inflight.types import Routes
from inflight.weights.publish.finite import NotFinite
from inflight.weights.publish.offer import Offer
from inflight.weights.publish.protocol import PublishProtocol
from inflight.weights.publish.routes import RoutesFile, routes
from inflight.weights.publish.session import Session

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Seconds by which a deadline or a broken transport may be noticed late; messages are handled at once."""
HEARD_AT_ONCE = 100
"""Most messages handled between two checks of the deadlines."""
CLOSE_S = 5.0


class PublisherLoop:
    """Owns the thread. `protocol` may be used under `changed`, which is notified after every event."""

    def __init__(
        self,
        listener: Listener,
        session: Session,
        ranks: Mapping[str, int],
        offer: Offer,
        routes_file: RoutesFile | None = None,
        guest_ranks: int = 0,
    ) -> None:
        """`ranks` is generator name → world size, `offer` what the trainer starts with; `guest_ranks`: see
        Membership."""
        self.error: BaseException | None = None
        """The error that ended publishing; nothing is delivered after it."""
        self.changed = threading.Condition(threading.RLock())
        self.session = session
        self.protocol = PublishProtocol(session, ranks, offer, guest_ranks)
        self._listener = listener
        self._routes_file = routes_file
        self._closing = threading.Event()
        self._checks: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def release(self, offer: Offer) -> None:
        """Sends the version in the send buffer to the generators, and checks it meanwhile."""
        with self.changed:
            self.protocol.release(offer)
        if not offer.checked:
            check = threading.Thread(target=self._check, args=[offer], name="finite check", daemon=True)
            check.start()
            self._checks = [each for each in self._checks if each.is_alive()] + [check]

    def wait(self, condition: Callable[[PublishProtocol], bool], timeout_s: float) -> bool:
        """Whether a condition became true within `timeout_s`. Also returns when publishing has ended: check `error`."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while self.error is None and not condition(self.protocol):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(left)
            return True

    def finish(self, reason: str) -> None:
        """Sends Finish to the engines."""
        with self.changed:
            engines = [replica.members.engine for replica in self.protocol.replicas]
            self.session.outbox.send(engines, Finish(reason=reason))

    def close(self) -> None:
        """Aborts versions that are not being committed yet and ends all threads; waits at most CLOSE_S for each, plus
        up to 2 s for each NCCL communicator that does not end at once."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_S)
        with self.changed:
            for replica in self.protocol.replicas:
                replica.close()
        for check in self._checks:
            check.join(CLOSE_S)  # a thread that is in torch when the interpreter ends makes the process abort
        if stuck := self.session.channels.join(CLOSE_S):
            log.warning("%d transfers are still stuck in the transport", stuck)

    def routes(self) -> Routes:
        """The generators that get requests; to be called under `changed`."""
        return routes(self.protocol.version, self.protocol.replicas, self.session.config.max_behind)

    def _hear(self, got: Received | Lost | None) -> None:
        """Drains queued messages before deadlines are checked, so a reply that arrived in time never counts as late."""
        heard = 0
        while got is not None:
            match got:
                case Lost(peer=peer, asked=asked):
                    self.protocol.lost(peer, asked=asked)
                case Received(peer=peer, message=message):
                    self.protocol.hear(peer, message)
            heard += 1
            got = self._listener.receive(0) if heard < HEARD_AT_ONCE else None

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                got = self._listener.receive(POLL_S)
                with self.changed:
                    self._hear(got)
                    unsound = self.protocol.expire()
                    self.error = self.error or unsound
                    self._write_routes()  # before the change is visible: a caller that sees it may read the file
                    self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - stored, and raised in the trainer's next wait
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _check(self, offer: Offer) -> None:
        """In a thread of its own: generators that hold the offer commit it, or it ends publishing."""
        try:
            with contextlib.suppress(NotFinite):  # the thread finds it, unless a newer version is in the buffer already
                offer.check()
            with self.changed:
                if offer.checked and not self._closing.is_set():
                    self.protocol.checked(offer)
                self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - stored, and raised in the trainer's next wait
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def _write_routes(self) -> None:
        if self._routes_file is not None:
            self._routes_file.write(self.routes())
