"""What is said to the generators and when: each version's way to each of them, as a state machine without threads.

One rule drives it: a generator that is IDLE and does not hold what lies in the send buffer is sent it. The version that
the trainer starts with, a new one, a late joiner, one that was cut off and one whose last attempt failed are all the
same case.

Not thread-safe: the dispatch calls in under its lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.config import PublishConfig
from inflight.messages import Aborted, AnyMessage, Committed, EngineHello, Failed, RankHello, Ready
from inflight.weights.pack import content_digest
from inflight.weights.publish.channel import Channel
from inflight.weights.publish.delivery import GONE, UNSETTLED, Delivery, State
from inflight.weights.publish.roster import Roster

ABORT_S = 2.0
"""What ranks get to let go of an attempt before they are left behind; how often Abort and Commit are repeated then."""
MAX_RETRY_S = 60.0


@dataclass(frozen=True, eq=False)
class Offer:
    """What lies in the send buffer."""

    version: int
    sums: Callable[[], list[int]]
    """The buckets' checksums; computed once, by the first sending thread. Raises NotFinite for a version that must not
    be sent."""


class Conversation:
    """Hears members and the clock; tells, begins and gives up. See delivery.State."""

    def __init__(
        self,
        roster: Roster,
        config: PublishConfig,
        submit: Callable[[Delivery, Offer], None],
        clock: Callable[[], float],
        offer: Offer,
    ) -> None:
        """`submit` has a delivery's channel call `prepare` and then send. `offer` is what the trainer starts with."""
        self.version = offer.version
        """The newest version that was released."""
        self._offer: Offer | None = offer
        """None while the trainer writes into the buffer."""
        self._roster, self._config, self._submit, self._clock = roster, config, submit, clock
        self._attempts = 0

    # --- what the trainer wants --------------------------------------------------------------------------------------

    def settled(self) -> bool:
        """Whether the newest version has an outcome everywhere."""
        return all(delivery.state not in UNSETTLED for delivery in self._deliveries)

    def withdraw(self, *, supersede: bool) -> bool:
        """Takes the offer back, so that the buffer may be written. False while a transfer that counts reads it.

        With `supersede` such transfers are given up, if any generator has got the version: else a trainer that is
        faster than every transfer would leave them all behind for ever.
        """
        sending = [delivery for delivery in self._deliveries if delivery.state is State.SENDING]
        if sending and not (supersede and self._has_arrived()):
            return False
        for delivery in sending:
            self._roster.pass_over(delivery, self.version, "a newer one is waiting")
            self._abort(delivery, "superseded", broken=True)
        self._offer = None
        return True

    def release(self, offer: Offer) -> None:
        """Takes what lies in the send buffer to every generator, now or as soon as it can take it."""
        self.version, self._offer = offer.version, offer
        for delivery in self._deliveries:
            committing = delivery.state is State.COMMITTING and delivery.owed == delivery.version
            if delivery.owed is not None and not committing:
                self._roster.pass_over(delivery, delivery.owed, f"{delivery.state.name}, {delivery.why}")
            delivery.owed, delivery.retry_at = offer.version, 0.0
            if delivery.state in (*GONE, State.STALLED, State.UNSURE):
                self._roster.record(delivery, offer.version, "absent", f"{delivery.state.name}, {delivery.why}")
        self._advance()

    def refuse(self, offer: Offer, reason: str) -> None:
        """Sends what lies in the buffer to nobody."""
        if self._offer is offer:
            self._offer = None
        for delivery in self._deliveries:
            if delivery.state is State.SENDING and delivery.version == offer.version:
                self._fail(delivery, "finite", reason, broken=False)

    # --- sending -----------------------------------------------------------------------------------------------------

    def prepare(self, delivery: Delivery, channel: Channel, attempt: int, sums: list[int]) -> bool:
        """Tells the ranks that bytes will come. False when the attempt is over before it has begun."""
        if delivery.channel is not channel or delivery.attempt != attempt or delivery.state is not State.SENDING:
            return False
        assert delivery.version is not None
        delivery.digest = content_digest(sums)
        delivery.due = self._clock() + self._config.transfer_timeout_s
        self._roster.tell_prepare(delivery, sums)
        return True

    def channel_failed(self, channel: Channel, reason: str) -> None:
        """A transport broke."""
        for delivery in self._deliveries:
            if delivery.channel is not channel:
                continue
            if delivery.state is State.SENDING:
                self._fail(delivery, "receive", reason, broken=True)
            elif delivery.state is State.IDLE:
                self._roster.open(delivery)
            else:
                delivery.broken = True

    # --- hearing -----------------------------------------------------------------------------------------------------

    def lost(self, peer: str, *, asked: bool = False) -> None:
        """The bus hears nothing of a peer any more; `asked`: since it was asked to end."""
        self._roster.lost(peer, asked=asked)

    def hear(self, peer: str, message: AnyMessage) -> None:
        """A message from a rank or an engine."""
        delivery = self._roster.of(peer)
        match message:
            case RankHello() | EngineHello():
                self._roster.hello(peer, message, self.version)
            case Failed(poisoned=True) if delivery is not None and peer in delivery.members:
                self._roster.poison(delivery, peer, message.version, message.reason)
            case _ if delivery is None or peer not in delivery.held:
                self._roster.ignore(peer, message, "not a member")
            case Ready() | Failed() | Aborted() if peer != delivery.engine:
                self._answer(delivery, peer, message)
            case Committed() | Failed() if peer == delivery.engine:
                self._outcome(delivery, peer, message)
            case _:
                self._roster.ignore(peer, message, "not for the publisher")
        self._advance()

    def _answer(self, delivery: Delivery, peer: str, answer: Ready | Failed | Aborted) -> None:
        """A rank's answer to Prepare or Abort."""
        ending = delivery.state in (State.ABORTING, State.STALLED)
        broken = isinstance(answer, Failed) and answer.phase in ("prepare", "receive")
        if answer.attempt != delivery.attempt or not (ending or delivery.state is State.SENDING):
            self._roster.ignore(peer, answer, f"{delivery.state.name}, attempt {delivery.attempt}")
        elif isinstance(answer, Failed) and answer.phase == "fit":
            self._roster.give_up(delivery, "fit", f"{peer}: {answer.reason}")
        elif ending:
            delivery.broken |= broken
            if isinstance(answer, Aborted):
                delivery.let_go.add(peer)
                self._rest_if_let_go(delivery)
        elif isinstance(answer, Failed):
            self._fail(delivery, answer.phase, f"{peer}: {answer.reason}", broken=broken)
        elif isinstance(answer, Aborted) or answer.version != delivery.version:
            self._roster.ignore(peer, answer, f"{delivery.state.name}, version {delivery.version}")
        elif answer.digest != delivery.digest:
            self._fail(delivery, "verify", f"{peer} is ready with other bytes than were sent", broken=False)
        else:
            delivery.ready[peer] = answer
            if not delivery.silent:
                self._commit(delivery, answer.version)

    def _commit(self, delivery: Delivery, version: int) -> None:
        """SENDING → COMMITTING: every rank holds the version in its shadow, verified."""
        now = self._clock()
        due = now + self._config.commit_timeout_s
        delivery.enter(State.COMMITTING, now, f"version {version} is being committed", due=due)
        delivery.commit_started = now
        self._roster.tell_commit(delivery, version)

    def _outcome(self, delivery: Delivery, peer: str, outcome: Committed | Failed) -> None:
        """The engine's answer to Commit, in time or late."""
        other = isinstance(outcome, Committed) and outcome.publisher != self._roster.publisher
        if other or outcome.version != delivery.version or delivery.state not in (State.COMMITTING, State.UNSURE):
            self._roster.ignore(peer, outcome, f"no commit of it is out ({delivery.state.name})")
        elif isinstance(outcome, Committed):
            self._roster.events.append(delivery.swap(outcome.gap_s, outcome.running, self._clock()))
            delivery.commit(outcome.version)
            if delivery.owed is not None and delivery.owed <= outcome.version:
                delivery.owed = None
            self._rest(delivery)
        else:
            self._fail(delivery, "commit", f"{peer}: {outcome.reason}", broken=delivery.broken)

    # --- time --------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Does what is due; to be called often."""
        now = self._clock()
        for delivery in self._deliveries:
            if delivery.due is not None and now >= delivery.due:
                self._take_due_step(delivery, now)
        self._roster.note_present()
        self._advance()

    def _take_due_step(self, delivery: Delivery, now: float) -> None:
        match delivery.state:
            case State.ABSENT:
                self._roster.enquire(delivery)
            case State.INCOMPATIBLE:
                self._roster.end_incompatible(delivery)
            case State.SENDING:
                silent, limit_s = ", ".join(delivery.silent), self._config.transfer_timeout_s
                self._fail(delivery, "receive", f"no answer from {silent} within {limit_s:g} s", broken=True)
            case State.ABORTING | State.STALLED:
                self._repeat_abort(delivery, now)
            case State.COMMITTING | State.UNSURE:
                self._repeat_commit(delivery, now)

    def _repeat_abort(self, delivery: Delivery, now: float) -> None:
        reason = f"no answer to Abort from {', '.join(delivery.silent)}"
        if delivery.state is State.ABORTING:
            delivery.enter(State.STALLED, now, reason)
            if delivery.owed is not None:
                self._roster.record(delivery, delivery.owed, "absent", f"STALLED, {reason}")
        delivery.due = now + ABORT_S
        self._roster.tell_abort(delivery, delivery.silent, reason)

    def _repeat_commit(self, delivery: Delivery, now: float) -> None:
        assert delivery.version is not None
        if delivery.state is State.COMMITTING:
            reason = f"{delivery.engine} did not answer Commit within {self._config.commit_timeout_s:g} s"
            self._roster.record(delivery, delivery.version, "commit", reason)
            delivery.enter(State.UNSURE, now, reason)
            if delivery.owed is not None:
                self._roster.record(delivery, delivery.owed, "absent", f"UNSURE, {reason}")
        delivery.due = now + ABORT_S
        self._roster.tell_commit(delivery, delivery.version)

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def _deliveries(self) -> list[Delivery]:
        return list(self._roster.deliveries.values())

    def _has_arrived(self) -> bool:
        """Whether any generator has the newest version, or nearly."""
        return any(
            delivery.committed == self.version
            or (delivery.state in (State.COMMITTING, State.UNSURE) and delivery.version == self.version)
            for delivery in self._deliveries
        )

    def _advance(self) -> None:
        """The rule of this module."""
        offer, now = self._offer, self._clock()
        if offer is None:
            return
        for delivery in self._deliveries:
            if delivery.state is not State.IDLE or delivery.held[delivery.engine] == offer.version:
                continue
            if now >= delivery.retry_at:
                self._attempts += 1
                delivery.begin(offer.version, self._attempts, now, now + self._config.transfer_timeout_s)
                self._submit(delivery, offer)

    def _fail(self, delivery: Delivery, phase: str, reason: str, *, broken: bool) -> None:
        """What is out failed: it is aborted, and sent again after a while."""
        assert delivery.version is not None
        self._roster.record(delivery, delivery.version, phase, reason)
        delay = self._config.retry_after_s * 2.0 ** min(delivery.failures, 16)
        delivery.failures, delivery.retry_at = delivery.failures + 1, self._clock() + min(delay, MAX_RETRY_S)
        delivery.trouble = f"version {delivery.version} failed ({phase}): {reason}"
        self._abort(delivery, reason, broken=broken)

    def _abort(self, delivery: Delivery, reason: str, *, broken: bool) -> None:
        """→ ABORTING, and on to IDLE when every rank has let go."""
        delivery.broken |= broken
        if broken and delivery.channel is not None:
            delivery.channel.close()  # lets the other ranks go at once
        now = self._clock()  # a transport that is late to close is no fault of the ranks
        delivery.enter(State.ABORTING, now, reason, due=now + ABORT_S)
        if delivery.digest is None:
            delivery.let_go.update(delivery.ranks)
        else:
            self._roster.tell_abort(delivery, delivery.ranks, reason)
        self._rest_if_let_go(delivery)

    def _rest_if_let_go(self, delivery: Delivery) -> None:
        if not delivery.silent:
            self._rest(delivery)

    def _rest(self, delivery: Delivery) -> None:
        """→ IDLE, with a new transport if the old one broke: nobody is in it any more."""
        if not delivery.broken or self._roster.open(delivery):
            delivery.enter(State.IDLE, self._clock())
