"""One generator at the publisher: takes a version from the offer to the commit, as a state machine without threads.

Not thread-safe: the loop calls in under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.messages import Aborted, AnyMessage, Committed, Failed, RankSwapped, Ready
from inflight.weights.publish.attempt import Attempt
from inflight.weights.publish.offer import Offer
from inflight.weights.publish.pin import Pin
from inflight.weights.publish.presence import Presence
from inflight.weights.publish.states import ReplicaState

ABORT_S = 2.0
"""Seconds for ranks to answer an Abort before the generator is STALLED; also the interval of repeated messages."""


class Replica(Presence):
    """The publisher's state of one generator, and its actions. See ReplicaState."""

    # --- what the trainer wants ---------------------------------------------------------------------------------------

    def release(self, version: int) -> None:
        """A new version is in the send buffer, and this generator has to get it; it replaces one that waits for the end
        of a pin."""
        self.standing.owe(version, self.attempt.version if self.attempt is not None else None)
        self.retry.at_once()
        if self.state is ReplicaState.READY:
            self._abort("superseded", broken=False)

    def send(self, offer: Offer) -> None:
        """Begins to send the version in the buffer, unless it is held or the state does not allow it now."""
        now = self._session.clock()
        if self.state is not ReplicaState.IDLE or self.members.version == offer.version or now < self.retry.at:
            return
        assert self.channel is not None
        self.standing.enter(ReplicaState.SENDING, now, f"version {offer.version} is being sent")
        self.attempt = Attempt(offer, self._session, self.members.ranks)
        self.channel.submit(self.attempt)

    def supersede(self, version: int) -> None:
        """Aborts sending `version`, because a newer one waits for the buffer."""
        if self.state is ReplicaState.SENDING:
            self.standing.pass_over(version, "a newer one is waiting")
            self._abort("superseded", broken=True)

    def checked(self, offer: Offer) -> None:
        """Commits an offer's version, if every rank holds it in its shadow and it is known that it may go live."""
        attempt = self.attempt
        if self.state is not ReplicaState.SENDING or attempt is None or attempt.offer is not offer:
            return
        if offer.checked and not attempt.silent(ending=False):
            self._delivered(attempt)

    def withdraw(self, offer: Offer, reason: str) -> None:
        """Aborts sending an offer that must not go live."""
        if self.state is ReplicaState.SENDING and self.attempt is not None and self.attempt.offer is offer:
            self._fail("finite", reason, broken=False)

    def keep(self, pin: Pin) -> bool:
        """Begins a pin. False when the generator does not stamp its version, or was sent the Commit of another one."""
        route = self.route
        if self.pin is not None or self.state is ReplicaState.COMMITTING or route is None:
            return False
        if route.version != pin.version or not self.state.routed or not self.caught_up:
            return False
        self.pin = pin
        pin.begin(self.generator, route)
        return True

    def unpin(self, reason: str) -> None:
        """Ends its pin, if it has one; a version that waited for that is committed."""
        if self.pin is None:
            return
        self.pin.end(reason)
        self.pin = None
        if self.state is ReplicaState.READY and self.attempt is not None:
            self._commit(self.attempt)

    def close(self) -> None:
        """Aborts a version that is being sent or waits, records one that was committed, and closes the channel."""
        self.standing.report()
        if self.state in (ReplicaState.SENDING, ReplicaState.READY) and self.attempt is not None:
            self.attempt.cancel("the publisher closes")
        self._drop_channel()

    # --- what its members answer --------------------------------------------------------------------------------------

    def hear(self, peer: str, message: AnyMessage) -> None:
        """Handles any message of a member except a hello."""
        match message:
            case Failed(poisoned=True) if peer in self.members.all:
                self._poison(peer, message.version, message.reason)
            case _ if peer not in self.members.held:
                self._session.outbox.ignore(peer, message, "not a member")
            case Ready() | Failed() | Aborted() if peer != self.members.engine:
                self._answer(peer, message)
            case RankSwapped() if peer != self.members.engine:
                self._rank_swapped(peer, message)
            case Committed() if peer == self.members.engine:
                self._engine_swapped(peer, message)
            case Failed() if peer == self.members.engine:
                self._refused(peer, message)
            case _:
                self._session.outbox.ignore(peer, message, "not for the publisher")

    def _answer(self, peer: str, answer: Ready | Failed | Aborted) -> None:
        """A rank's answer to Prepare or Abort."""
        attempt = self.attempt
        ending = self.state in (ReplicaState.ABORTING, ReplicaState.STALLED)
        number = attempt.number if attempt is not None else None
        if attempt is None or answer.attempt != number or not (ending or self.state is ReplicaState.SENDING):
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
            attempt.hear(peer, answer)
            self.checked(attempt.offer)

    @property
    def _committing(self) -> Attempt | None:
        """The attempt whose Commit is out."""
        return self.attempt if self.state in (ReplicaState.COMMITTING, ReplicaState.UNSURE) else None

    def _rank_swapped(self, peer: str, report: RankSwapped) -> None:
        """A rank computes with a version. When all do, the version is committed: the engine's answer, which follows, is
        not waited for (docs/decisions/019-ranks-report-swaps.md)."""
        attempt = self._committing
        if attempt is not None and attempt.is_of(report):
            attempt.swapped[peer] = report.gap_s
            if len(attempt.swapped) == len(self.members.ranks):
                self._complete(attempt)
        elif report.publisher != self._session.publisher or report.version != self.members.held[peer]:
            # Otherwise the engine was heard first, or the rank twice.
            self._session.outbox.ignore(peer, report, f"no commit of it is out ({self.state.name})")

    def _engine_swapped(self, peer: str, answer: Committed) -> None:
        """The engine's answer to Commit, in time or late; its ranks may have reported the commit before."""
        attempt = self._committing
        own = answer.publisher == self._session.publisher
        if attempt is not None and attempt.is_of(answer):
            self._complete(attempt, answer)
        elif not own or not self.standing.figures(answer.version, answer.gap_s, answer.running):
            self._session.outbox.ignore(peer, answer, f"no commit of it is out ({self.state.name})")

    def _refused(self, peer: str, answer: Failed) -> None:
        """The engine has swapped nothing."""
        attempt = self._committing
        if attempt is not None and (attempt.version, attempt.number) == (answer.version, answer.attempt):
            self._fail("commit", f"{peer}: {answer.reason}", broken=attempt.broken)
        else:
            self._session.outbox.ignore(peer, answer, f"no commit of it is out ({self.state.name})")

    def _complete(self, attempt: Attempt, answer: Committed | None = None) -> None:
        """All members hold the version, as all ranks have reported, or the engine in its `answer`."""
        now = self._session.clock()
        self.standing.swap(attempt.swap(self.generator, now), now + self._session.config.commit_timeout_s)
        if answer is not None:
            self.standing.figures(answer.version, answer.gap_s, answer.running)
        self.members.commit(attempt.version)
        self.caught_up = True
        self.retry.clear()
        self._rest(attempt)

    def expire(self) -> None:
        """Detects a channel that has ended, and carries out what is due; to be called often."""
        if self.channel is not None and self.channel.error is not None:
            self._channel_ended(str(self.channel.error))
        now = self._session.clock()
        self.standing.expire(now)
        attempt = self.attempt
        if self.pin is not None and now >= self.pin.due:
            self.unpin("it was not released in time")
        if attempt is None or self.due is None or now < self.due:
            return  # Membership handles generators that are not present
        if self.state is ReplicaState.SENDING:
            limit_s = self._session.config.transfer_timeout_s
            if silent := ", ".join(attempt.silent(ending=False)):
                self._fail("receive", f"no answer from {silent} within {limit_s:g} s", broken=True)
            else:
                self._fail("finite", f"the check for NaN and Inf took more than {limit_s:g} s", broken=True)
        elif self.state in (ReplicaState.ABORTING, ReplicaState.STALLED):
            self._repeat_abort(attempt, now)
        else:
            self._repeat_commit(attempt, now)

    def _channel_ended(self, reason: str) -> None:
        if self.state is ReplicaState.SENDING:
            self._fail("receive", reason, broken=True)
        elif self.state is ReplicaState.IDLE:
            self.reopen()
        elif self.attempt is not None:
            self.attempt.broken = True

    def _repeat_abort(self, attempt: Attempt, now: float) -> None:
        silent = attempt.silent(ending=True)
        reason = f"no answer to Abort from {', '.join(silent)}"
        if self.state is ReplicaState.ABORTING:
            self.standing.enter(ReplicaState.STALLED, now, reason)
            self.standing.miss()
        self.postpone(now + ABORT_S)
        attempt.abort(silent, reason)

    def _repeat_commit(self, attempt: Attempt, now: float) -> None:
        if self.state is ReplicaState.COMMITTING:
            limit_s = self._session.config.commit_timeout_s
            reason = f"{self.members.engine} did not answer Commit within {limit_s:g} s"
            self.standing.fail(attempt.version, "commit", reason)
            self.standing.enter(ReplicaState.UNSURE, now, reason)
            self.standing.miss()
        self.postpone(now + ABORT_S)
        attempt.commit(self.members.engine)

    def _delivered(self, attempt: Attempt) -> None:
        """Every rank holds the version in its shadow, verified: it is committed, at once or after the pin."""
        if self.pin is None:
            self._commit(attempt)
        else:
            why = f"version {attempt.version} waits in the shadow, version {self.pin.version} is pinned"
            self.standing.enter(ReplicaState.READY, self._session.clock(), why, due=self.pin.due)

    def _commit(self, attempt: Attempt) -> None:
        """→ COMMITTING."""
        now = self._session.clock()
        due = now + self._session.config.commit_timeout_s
        self.standing.enter(ReplicaState.COMMITTING, now, f"version {attempt.version} is being committed", due=due)
        attempt.commit(self.members.engine)

    def _fail(self, phase: str, reason: str, *, broken: bool) -> None:
        """The current attempt failed: it is aborted, and retried after a delay."""
        assert self.attempt is not None
        version = self.attempt.version
        first_s = self._session.config.retry_after_s
        self.standing.fail(version, phase, reason)
        self.retry.failed(self._session.clock(), first_s, f"version {version} failed ({phase}): {reason}")
        self._abort(reason, broken=broken)

    def _abort(self, reason: str, *, broken: bool) -> None:
        """→ ABORTING, and on to IDLE when every rank has released the version."""
        attempt = self.attempt
        assert attempt is not None
        attempt.broken |= broken
        if broken and self.channel is not None:
            self.channel.close()  # releases the other ranks at once
        now = self._session.clock()  # after closing: a transport that is slow to close is not the ranks' fault
        self.standing.enter(ReplicaState.ABORTING, now, reason, due=now + ABORT_S)
        self._let_go(attempt, [] if attempt.cancel(reason) else self.members.ranks)

    def _let_go(self, attempt: Attempt, ranks: Sequence[str]) -> None:
        attempt.let_go.update(ranks)
        if not attempt.silent(ending=True):
            self._rest(attempt)

    def _rest(self, attempt: Attempt) -> None:
        """→ IDLE, with a new transport if the old one broke, since nothing uses that any more."""
        self.attempt = None
        if not attempt.broken or self.reopen():
            self.standing.enter(ReplicaState.IDLE, self._session.clock())
