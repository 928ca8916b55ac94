"""The buffer's side of the actors: what one sends is entered in the ledger and answered, and it gets its questions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from inflight.bus import BusError, Listener, Lost, Received
from inflight.messages import (
    ActorBye,
    ActorHello,
    AnyMessage,
    Finish,
    Grant,
    GroupAck,
    GroupDone,
    GroupFailed,
    Routed,
    RoutesWanted,
)
from inflight.messages.reasons import ACTOR_LOST
from inflight.rollout.actor_routes import ActorRoutes
from inflight.rollout.ledger import Ledger
from inflight.rollout.stream import Writer
from inflight.types import Routes


class Actors:
    """Not thread-safe: the buffer calls it with its lock held, except for `send_routes`."""

    def __init__(self, listener: Listener, ledger: Ledger, writer: Writer | None, routes: Callable[[], Routes]) -> None:
        """`writer` gets each new group; None: groups are not recorded. `routes` are read at each `send_routes`."""
        self._listener = listener
        self._ledger = ledger
        self._writer = writer
        self._routes = ActorRoutes(routes)
        self._heard: dict[str, float] = {}
        """Actor → when it was last heard (monotonic seconds)."""
        self._finish: Finish | None = None
        """The last message to each actor, also to those that join later."""

    @property
    def finished(self) -> bool:
        """Whether they were sent the end of the run: nothing more is granted."""
        return self._finish is not None

    def hear(self, event: Received | Lost) -> None:
        """Handles a message of an actor's, or its loss."""
        if isinstance(event, Lost):
            self._routes.forget(event.peer)
            self._ledger.leave(event.peer, ACTOR_LOST)
        else:
            self._handle(event.peer, event.message)

    def grant(self) -> None:
        """Sends each actor the questions that it is to answer; none after the end."""
        if self._finish is None:
            for actor, questions in sorted(self._ledger.grants().items()):
                self._send(actor, Grant(questions=questions, attempts=self._ledger.attempts(questions)))

    def finish(self, reason: str) -> None:
        """Sends the end of the run."""
        self._finish = Finish(reason=reason)
        for actor in self._ledger.in_flight:
            self._send(actor, self._finish)

    def send_routes(self) -> None:
        """To actors that were sent other ones. Without the lock: the routes are under one of the publisher's."""
        for actor, routes in self._routes.unsent():
            self._send(actor, Routed(routes=routes))

    def __str__(self) -> str:
        """Those that have joined, with what each has in flight and when it was heard."""
        now = time.monotonic()
        alive = ", ".join(
            f"{name} ({groups} in flight, heard {now - self._heard[name]:.0f} s ago)"
            for name, groups in sorted(self._ledger.in_flight.items())
        )
        return alive or "none"

    def _handle(self, peer: str, message: AnyMessage) -> None:
        self._heard[peer] = time.monotonic()
        if isinstance(message, RoutesWanted | ActorHello):
            self._routes.want(peer)  # with each hello, should a message have been lost
        if isinstance(message, RoutesWanted):
            return
        if isinstance(message, ActorHello):
            self._ledger.hello(peer, message.incarnation)
            if self._finish is not None:
                self._send(peer, self._finish)
        elif isinstance(message, ActorBye):
            self._ledger.leave(peer, message.reason)
        elif isinstance(message, GroupDone | GroupFailed):
            self._settle(peer, message)
        else:
            self._ledger.ignore(f"unexpected {type(message).__name__}")

    def _settle(self, peer: str, message: GroupDone | GroupFailed) -> None:
        """Written before it is acknowledged; repeats are acknowledged too."""
        stored = self._ledger.settle(peer, message)
        if stored is not None and self._writer is not None:
            self._writer.append_frame(stored.frame)
        self._send(peer, GroupAck(group_id=message.group_id))

    def _send(self, peer: str, message: AnyMessage) -> None:
        """A lost peer is no error here: the bus reports it as Lost, where it is counted."""
        with contextlib.suppress(BusError):
            self._listener.send(peer, message)
