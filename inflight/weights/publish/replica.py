"""One generator at the publisher: takes a version from the offer to the commit, as a state machine without threads.

Not thread-safe: the loop calls in under its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from inflight.messages import Aborted, AnyMessage, Committed, Failed, Ready
from inflight.weights.publish.attempt import Attempt
from inflight.weights.publish.channel import Channel
from inflight.weights.publish.members import Members
from inflight.weights.publish.offer import Offer
from inflight.weights.publish.retry import Retry
from inflight.weights.publish.session import Session
from inflight.weights.publish.standing import Standing
from inflight.weights.publish.states import State
from inflight.weights.transport.base import TransportError

log = logging.getLogger(__name__)
ABORT_S = 2.0
"""What ranks get to answer an Abort before the generator is STALLED; the interval of repeated Aborts and Commits."""


class Replica:
    """What the publisher knows of one generator, and what it does about it. See State."""

    def __init__(self, generator: str, world_size: int, session: Session) -> None:
        self.generator, self.members = generator, Members(generator, world_size)
        self.caught_up = False
        """Since it joined it has once held what was the newest version then."""
        self.standing = Standing(generator, session.events, session.clock())
        self.retry = Retry()
        self.attempt: Attempt | None = None
        """The version that is out, until it is decided and all ranks have let go."""
        self.channel: Channel | None = None
        self._session = session

    @property
    def state(self) -> State:
        """How it stands to the versions that are published."""
        return self.standing.state

    @property
    def committed(self) -> int | None:
        """The version of this publisher that its engine stamps; None when it has none, or that is not certain."""
        return self.members.version if self.state.certain else None

    @property
    def reason(self) -> str:
        """Why it does not hold the newest version, for people; empty when nothing is known to prevent it."""
        return self.standing.why or self.retry.trouble

    @property
    def due(self) -> float | None:
        """When the state's next step must be taken if nothing happens; None: there is none."""
        return self.attempt.due if self.attempt is not None and self.state is State.SENDING else self.standing.due

    def has(self, version: int) -> bool:
        """Whether it holds a version, or was told to commit it."""
        told = self.attempt is not None and self.attempt.version == version
        return self.committed == version or (told and self.state in (State.COMMITTING, State.UNSURE))

    # --- what the trainer wants ---------------------------------------------------------------------------------------

    def release(self, version: int) -> None:
        """A new version is in the send buffer, and is owed to this generator."""
        self.standing.owe(version, self.attempt.version if self.attempt is not None else None)
        self.retry.at_once()

    def send(self, offer: Offer) -> None:
        """Begins to send what lies in the buffer, unless it is held, or this is not the time."""
        now = self._session.clock()
        if self.state is not State.IDLE or self.members.version == offer.version or now < self.retry.at:
            return
        assert self.channel is not None
        self.standing.enter(State.SENDING, now, f"version {offer.version} is being sent")
        self.attempt = Attempt(offer, self._session, self.members.ranks)
        self.channel.submit(self.attempt)

    def supersede(self, version: int) -> None:
        """Gives up sending `version`, since a newer one is waiting for the buffer."""
        if self.state is State.SENDING:
            self.standing.pass_over(version, "a newer one is waiting")
            self._abort("superseded", broken=True)

    def withdraw(self, offer: Offer, reason: str) -> None:
        """Gives up sending an offer that must not be sent."""
        if self.state is State.SENDING and self.attempt is not None and self.attempt.offer is offer:
            self._fail("finite", reason, broken=False)

    def close(self) -> None:
        """Aborts what is being sent, and closes the channel."""
        if self.state is State.SENDING and self.attempt is not None:
            self.attempt.cancel("the publisher closes")
        self._drop_channel()

    # --- membership: called by Membership ----------------------------------------------------------------------------

    def join(self, newest: int) -> bool:
        """→ IDLE, with a transport to all its members. False, leaving ABSENT, when none can be opened."""
        if not self.reopen():
            return False
        self.standing.enter(State.IDLE, self._session.clock())
        self.caught_up, self.standing.asked_to_end = self.members.version == newest, False
        self.retry.clear()
        return True

    def reopen(self) -> bool:
        """A new transport, and a Welcome to it for every rank. False, leaving ABSENT, when it can't be opened."""
        self._drop_channel()
        try:
            self.channel = self._session.connect(self.generator, self.members.ranks)
        except TransportError as error:
            self.leave(str(error))
        return self.channel is not None

    def leave(self, reason: str, *, asked: bool = False) -> None:
        """→ ABSENT: all its members must say hello (again), until then nothing is claimed. `asked`: it is to end."""
        self.standing.asked_to_end = asked
        self._end_attempt("receive", reason)
        self._stop_claiming(State.ABSENT, reason, due=self._session.clock())

    def give_up(self, phase: str, reason: str, *, end: bool = False) -> None:
        """→ INCOMPATIBLE: neither waiting nor another version helps, only its restart or another publisher.

        `end`: it is of no use to this publisher in any case, so its engine is to be refused, and ends.
        """
        if self.state not in (State.POISONED, State.INCOMPATIBLE):
            log.error("%s is of no use until it is restarted: %s", self.generator, reason)
            self._end_attempt(phase, reason)
            self._stop_claiming(State.INCOMPATIBLE, reason, due=self._session.clock() if end else None)

    def _poison(self, peer: str, version: int, reason: str) -> None:
        """→ POISONED: only a restart brings it back. Its engine is refused, and ends."""
        if self.state is not State.POISONED:
            self.standing.fail(version, "commit", f"poisoned, {peer}: {reason}")
            self._stop_claiming(State.POISONED, f"{peer}: {reason}", due=None)
            self._session.outbox.send_refusal(self.members.engine, f"{peer} may hold a torn version")

    def _end_attempt(self, phase: str, reason: str) -> None:
        attempt = self.attempt
        if attempt is None or self.state not in (State.SENDING, State.COMMITTING):
            return
        self.standing.fail(attempt.version, "commit" if self.state is State.COMMITTING else phase, reason)
        if self.state is State.SENDING:
            attempt.cancel(reason)

    def _stop_claiming(self, state: State, reason: str, *, due: float | None) -> None:
        self._drop_channel()
        if self.attempt is not None:
            self.attempt.end()
            self.attempt = None
        self.members.forget()
        self.caught_up = False
        self.standing.enter(state, self._session.clock(), reason, due=due)
        self.standing.miss()

    # --- what its members answer --------------------------------------------------------------------------------------

    def hear(self, peer: str, message: AnyMessage) -> None:
        """Any message of a member but a hello."""
        match message:
            case Failed(poisoned=True) if peer in self.members.all:
                self._poison(peer, message.version, message.reason)
            case _ if peer not in self.members.held:
                self._session.outbox.ignore(peer, message, "not a member")
            case Ready() | Failed() | Aborted() if peer != self.members.engine:
                self._answer(peer, message)
            case Committed() | Failed() if peer == self.members.engine:
                self._outcome(peer, message)
            case _:
                self._session.outbox.ignore(peer, message, "not for the publisher")

    def _answer(self, peer: str, answer: Ready | Failed | Aborted) -> None:
        """A rank's answer to Prepare or Abort."""
        attempt, ending = self.attempt, self.state in (State.ABORTING, State.STALLED)
        number = attempt.number if attempt is not None else None
        if attempt is None or answer.attempt != number or not (ending or self.state is State.SENDING):
            self._session.outbox.ignore(peer, answer, f"{self.state.name}, attempt {number}")
            return
        broken = isinstance(answer, Failed) and answer.phase in ("prepare", "receive")
        if isinstance(answer, Failed) and answer.phase == "fit":
            self.give_up("fit", f"{peer}: {answer.reason}")
        elif ending:
            attempt.broken |= broken
            if isinstance(answer, Aborted):
                self._let_go(attempt, [peer])
        elif isinstance(answer, Failed):
            self._fail(answer.phase, f"{peer}: {answer.reason}", broken=broken)
        elif isinstance(answer, Aborted) or answer.version != attempt.version:
            self._session.outbox.ignore(peer, answer, f"{self.state.name}, version {attempt.version}")
        elif answer.digest != attempt.digest:
            self._fail("verify", f"{peer} is ready with other bytes than were sent", broken=False)
        else:
            attempt.ready[peer] = answer
            if not attempt.silent(ending=False):
                self._commit(attempt)

    def _outcome(self, peer: str, outcome: Committed | Failed) -> None:
        """The engine's answer to Commit, in time or late."""
        attempt = self.attempt if self.state in (State.COMMITTING, State.UNSURE) else None
        other = isinstance(outcome, Committed) and outcome.publisher != self._session.publisher
        if attempt is None or other or outcome.version != attempt.version:
            self._session.outbox.ignore(peer, outcome, f"no commit of it is out ({self.state.name})")
        elif isinstance(outcome, Committed):
            now = self._session.clock()
            self.standing.swap(attempt.swap(self.generator, outcome.gap_s, outcome.running, now))
            self.members.commit(outcome.version)
            self.caught_up = True
            self.retry.clear()
            self._rest(attempt)
        else:
            self._fail("commit", f"{peer}: {outcome.reason}", broken=attempt.broken)

    def expire(self) -> None:
        """Notices a channel that has ended, and does what is due; to be called often."""
        if self.channel is not None and self.channel.error is not None:
            self._channel_ended(str(self.channel.error))
        now, attempt = self._session.clock(), self.attempt
        if attempt is None or self.due is None or now < self.due:
            return  # Membership asks those that take no part
        if self.state is State.SENDING:
            silent, limit_s = ", ".join(attempt.silent(ending=False)), self._session.config.transfer_timeout_s
            self._fail("receive", f"no answer from {silent} within {limit_s:g} s", broken=True)
        elif self.state in (State.ABORTING, State.STALLED):
            self._repeat_abort(attempt, now)
        else:
            self._repeat_commit(attempt, now)

    def _channel_ended(self, reason: str) -> None:
        if self.state is State.SENDING:
            self._fail("receive", reason, broken=True)
        elif self.state is State.IDLE:
            self.reopen()
        elif self.attempt is not None:
            self.attempt.broken = True

    def _repeat_abort(self, attempt: Attempt, now: float) -> None:
        silent = attempt.silent(ending=True)
        reason = f"no answer to Abort from {', '.join(silent)}"
        if self.state is State.ABORTING:
            self.standing.enter(State.STALLED, now, reason)
            self.standing.miss()
        self.standing.due = now + ABORT_S
        attempt.abort(silent, reason)

    def _repeat_commit(self, attempt: Attempt, now: float) -> None:
        if self.state is State.COMMITTING:
            limit_s = self._session.config.commit_timeout_s
            reason = f"{self.members.engine} did not answer Commit within {limit_s:g} s"
            self.standing.fail(attempt.version, "commit", reason)
            self.standing.enter(State.UNSURE, now, reason)
            self.standing.miss()
        self.standing.due = now + ABORT_S
        attempt.commit(self.members.engine)

    def _commit(self, attempt: Attempt) -> None:
        """SENDING → COMMITTING: every rank holds the version in its shadow, verified."""
        now = self._session.clock()
        due = now + self._session.config.commit_timeout_s
        self.standing.enter(State.COMMITTING, now, f"version {attempt.version} is being committed", due=due)
        attempt.commit(self.members.engine)

    def _fail(self, phase: str, reason: str, *, broken: bool) -> None:
        """What is out failed: it is aborted, and sent again after a while."""
        assert self.attempt is not None
        version, first_s = self.attempt.version, self._session.config.retry_after_s
        self.standing.fail(version, phase, reason)
        self.retry.failed(self._session.clock(), first_s, f"version {version} failed ({phase}): {reason}")
        self._abort(reason, broken=broken)

    def _abort(self, reason: str, *, broken: bool) -> None:
        """→ ABORTING, and on to IDLE when every rank has let go."""
        attempt = self.attempt
        assert attempt is not None
        attempt.broken |= broken
        if broken and self.channel is not None:
            self.channel.close()  # frees the other ranks at once
        now = self._session.clock()  # a transport that is late to close is no fault of the ranks
        self.standing.enter(State.ABORTING, now, reason, due=now + ABORT_S)
        self._let_go(attempt, [] if attempt.cancel(reason) else self.members.ranks)

    def _let_go(self, attempt: Attempt, ranks: Sequence[str]) -> None:
        attempt.let_go.update(ranks)
        if not attempt.silent(ending=True):
            self._rest(attempt)

    def _rest(self, attempt: Attempt) -> None:
        """→ IDLE, with a new transport if the old one broke: nothing uses it any more."""
        self.attempt = None
        if not attempt.broken or self.reopen():
            self.standing.enter(State.IDLE, self._session.clock())

    def _drop_channel(self) -> None:
        if self.channel is not None:
            self._session.channels.close(self.channel)
            self.channel = None
