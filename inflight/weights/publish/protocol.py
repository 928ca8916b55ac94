"""Publisher-side protocol that delivers each version to each generator: a state machine without threads or I/O.

One rule drives it: a generator that is IDLE and does not hold the version in the send buffer is sent it, at once or
when its next attempt is due (retry.py). The version that the trainer starts with, a new one, a late joiner, a generator
that was disconnected and one whose last attempt failed are all the same case.

Not thread-safe: the loop calls in under its lock.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight.messages import AnyMessage, EngineHello, RankHello
from inflight.weights.publish.finite import NotFinite
from inflight.weights.publish.membership import Membership
from inflight.weights.publish.offer import Offer
from inflight.weights.publish.pin import Pin
from inflight.weights.publish.replica import Replica
from inflight.weights.publish.session import Session
from inflight.weights.publish.states import ReplicaState


class PublishProtocol:
    """Passes releases of the trainer, messages of members and the clock on to each replica."""

    def __init__(self, session: Session, ranks: Mapping[str, int], offer: Offer, guest_ranks: int = 0) -> None:
        """`ranks` is generator name → world size, `offer` what the trainer starts with; `guest_ranks`: see
        Membership."""
        self.version = offer.version
        """The newest version that was released."""
        self.membership = Membership(session, ranks, guest_ranks)
        self._session = session
        self._offer: Offer | None = offer
        """None while the trainer writes into the buffer."""
        self._pin: Pin | None = None
        """The last one that was requested."""

    @property
    def replicas(self) -> list[Replica]:
        """One for each generator."""
        return list(self.membership.replicas.values())

    def settled(self) -> bool:
        """Whether the newest version has an outcome at every generator, and all outcomes are recorded."""
        return all(replica.settled for replica in self.replicas)

    def withdraw(self, *, supersede: bool) -> bool:
        """Takes the offer back, so that the buffer may be written. False while a transfer that counts reads it.

        With `supersede` such transfers are aborted, if any generator has the version: without that condition a trainer
        that is faster than every transfer would deliver none.
        """
        sending = [replica for replica in self.replicas if replica.state is ReplicaState.SENDING]
        if sending and not (supersede and any(replica.has(self.version) for replica in self.replicas)):
            return False
        for replica in sending:
            replica.supersede(self.version)
        self._offer = None
        return True

    def release(self, offer: Offer) -> None:
        """Sends the version in the send buffer to every generator, now or as soon as the generator can take it."""
        self.version = offer.version
        self._offer = offer
        for replica in self.replicas:
            replica.release(offer.version)
        self._send()

    def pin(self, version: int, timeout_s: float, *, routed: bool) -> Pin:
        """The first generator that stamps `version` keeps it until `unpin`, at most for `timeout_s` from now.

        Raises ValueError while another pin has not ended: at most one generator is pinned.
        """
        if self._pin is not None and not self._pin.ended:
            raise ValueError(f"version {self._pin.version} is pinned already")
        self._pin = Pin(version, self._session.clock() + timeout_s, routed)
        self._place()
        return self._pin

    def unpin(self, pin: Pin, reason: str) -> None:
        """Ends a pin: its generator commits the newest version that it was sent. No effect on a pin that has ended."""
        pin.end(reason)
        for replica in self.replicas:
            if replica.pin is pin:
                replica.unpin(reason)
        self._send()

    def _place(self) -> None:
        """Gives a wanted pin to a generator; ends it when none can stamp its version any more."""
        pin = self._pin
        if pin is None or not pin.wanted or any(replica.keep(pin) for replica in self.replicas):
            return
        if self._session.clock() >= pin.due:
            pin.end(f"no generator has got version {pin.version} in time")
        elif self.version > pin.version and not any(replica.has(pin.version) for replica in self.replicas):
            pin.end(f"no generator has got version {pin.version} before version {self.version}")

    def lost(self, peer: str, *, asked: bool = False) -> None:
        """The bus has lost a peer; `asked`: the peer was asked to end."""
        self.membership.lost(peer, asked=asked)

    def hear(self, peer: str, message: AnyMessage) -> None:
        """Handles a message from a rank or an engine."""
        if isinstance(message, RankHello | EngineHello):
            self.membership.hello(peer, message, self.version)
        elif (replica := self.membership.of(peer)) is not None:
            replica.hear(peer, message)
        else:
            self._session.outbox.ignore(peer, message, "not a member")
        self._place()  # before anything is sent that would be committed over the pinned version
        if (replica := self.membership.of(peer)) is not None and self._offer is not None:
            replica.send(self._offer)  # the others' states are as they were: there may be a thousand

    def checked(self, offer: Offer) -> None:
        """It is known that an offer may go live: generators all of whose ranks hold it commit it."""
        for replica in self.replicas:
            replica.checked(offer)

    def expire(self) -> NotFinite | None:
        """Carries out what is due; to be called often. Returns why the version in the buffer must not go live, if
        so."""
        unsound = self._offer.unsound if self._offer is not None else None
        if self._offer is not None and unsound is not None:
            for replica in self.replicas:
                replica.withdraw(self._offer, str(unsound))
            self._offer = None
        for replica in self.replicas:
            replica.expire()
        self.membership.expire()
        self._place()
        self._send()
        return unsound

    def _send(self) -> None:
        """Applies the rule of this module."""
        if self._offer is not None:
            for replica in self.replicas:
                replica.send(self._offer)
