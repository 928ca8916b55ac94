"""The presence of one generator: its members, what they hold, and how it joins and leaves.

Not thread-safe: the loop calls in under its lock.
"""

from __future__ import annotations

import logging

from inflight.types import Route
from inflight.weights.publish.attempt import Attempt
from inflight.weights.publish.channel import Channel
from inflight.weights.publish.members import Members
from inflight.weights.publish.pin import Pin
from inflight.weights.publish.retry import Backoff
from inflight.weights.publish.session import Session
from inflight.weights.publish.standing import Standing
from inflight.weights.publish.states import ReplicaState
from inflight.weights.transport.base import TransportError

log = logging.getLogger(__name__)


class Presence:
    """The part of a Replica that Membership works with: all that is known of the generator, without the delivery."""

    def __init__(self, generator: str, world_size: int, session: Session) -> None:
        self.generator = generator
        self.members = Members(generator, world_size)
        self.caught_up = False
        """Since it joined, it has held a version that was the newest one at that time."""
        self.standing = Standing(generator, session.events, session.clock(), expected=not session.elastic)
        self.retry = Backoff()
        self.attempt: Attempt | None = None
        """The version that is being delivered, until its outcome is known and all ranks have released it."""
        self.pin: Pin | None = None
        """The version that it has to keep stamping; while there is one, nothing is committed."""
        self.channel: Channel | None = None
        self._session = session

    @property
    def state(self) -> ReplicaState:
        """Its state in the delivery of versions."""
        return self.standing.state

    @property
    def committed(self) -> int | None:
        """The version of this publisher that its engine stamps; None when it has none or that is uncertain."""
        return self.members.version if self.state.certain else None

    @property
    def route(self) -> Route | None:
        """Its address, which start of it, and `committed`; None with that."""
        if (version := self.committed) is None:
            return None
        return Route(url=self.members.url, version=version, incarnation=self.members.incarnation or "")

    @property
    def reason(self) -> str:
        """Why it does not hold the newest version, as text; empty when no obstacle is known."""
        return self.standing.why or self.retry.trouble

    @property
    def due(self) -> float | None:
        """Time at which the state's next step must be taken if no message comes before; None: never."""
        sending = self.state is ReplicaState.SENDING
        return self.attempt.due if self.attempt is not None and sending else self.standing.due

    @property
    def settled(self) -> bool:
        """Whether the newest version has an outcome, which is recorded."""
        return self.state.settled and self.standing.unreported is None

    def has(self, version: int) -> bool:
        """Whether it holds a version, or was sent the Commit of it."""
        told = self.attempt is not None and self.attempt.version == version
        return self.committed == version or (told and self.state in (ReplicaState.COMMITTING, ReplicaState.UNSURE))

    def join(self, newest: int) -> bool:
        """→ IDLE, with a transport to all its members. False, leaving ABSENT, when none can be opened."""
        if not self.reopen():
            return False
        self.standing.enter(ReplicaState.IDLE, self._session.clock())
        self.caught_up = self.members.version == newest
        self.standing.asked_to_end = False
        self.retry.clear()
        return True

    def incomplete(self, why: str) -> None:
        """Stays ABSENT although a member said hello; `why`, for people."""
        self.standing.why = why

    def postpone(self, due: float) -> None:
        """The state's next step is taken at `due`, in the clock's seconds."""
        self.standing.due = due

    def reopen(self) -> bool:
        """A new transport, and a Welcome to it for every rank. False, leaving ABSENT, when it can't be opened."""
        self._drop_channel()
        try:
            self.channel = self._session.connect(self.generator, self.members.places)
        except TransportError as error:
            self.leave(str(error))
        return self.channel is not None

    def leave(self, reason: str, *, asked: bool = False) -> None:
        """→ ABSENT: all its members must say hello (again), nothing is claimed before. `asked`: it was asked to end."""
        self.standing.asked_to_end = asked
        self.standing.report()  # before the outcomes that follow from its loss
        self._end_attempt("receive", reason)
        self._stop_claiming(ReplicaState.ABSENT, reason, due=self._session.clock())

    def give_up(self, phase: str, reason: str, *, end: bool = False) -> None:
        """→ INCOMPATIBLE: neither waiting nor another version helps, only its restart or another publisher.

        `end`: this publisher can never use it, so its engine is refused, and ends.
        """
        if self.state not in (ReplicaState.POISONED, ReplicaState.INCOMPATIBLE):
            log.error("%s can't be used until it is restarted: %s", self.generator, reason)
            self.standing.report()
            self._end_attempt(phase, reason)
            self._stop_claiming(ReplicaState.INCOMPATIBLE, reason, due=self._session.clock() if end else None)

    def _poison(self, peer: str, version: int, reason: str) -> None:
        """→ POISONED: only a restart makes it usable. Its engine is refused, and ends."""
        if self.state is not ReplicaState.POISONED:
            self.standing.report()
            self.standing.fail(version, "commit", f"poisoned, {peer}: {reason}")
            self._stop_claiming(ReplicaState.POISONED, f"{peer}: {reason}", due=None)
            self._session.outbox.send_refusal(self.members.engine, f"{peer} may hold a torn version")

    def _end_attempt(self, phase: str, reason: str) -> None:
        attempt = self.attempt
        if attempt is None or self.state not in (ReplicaState.SENDING, ReplicaState.READY, ReplicaState.COMMITTING):
            return
        self.standing.fail(attempt.version, "commit" if self.state is ReplicaState.COMMITTING else phase, reason)
        if self.state is not ReplicaState.COMMITTING:
            attempt.cancel(reason)

    def _stop_claiming(self, state: ReplicaState, reason: str, *, due: float | None) -> None:
        self._drop_channel()
        if self.pin is not None:
            self.pin.end(f"{self.generator}: {reason}")
            self.pin = None
        if self.attempt is not None:
            self.attempt.end()
            self.attempt = None
        self.members.forget()
        self.caught_up = False
        self.standing.enter(state, self._session.clock(), reason, due=due)
        self.standing.miss()

    def _drop_channel(self) -> None:
        if self.channel is not None:
            self._session.channels.close(self.channel)
            self.channel = None
