"""Who takes part: generators whose ranks and engine have said hello, each with a transport of its own.

Not thread-safe: the dispatch calls in under its lock."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from inflight.bus import BusError
from inflight.config import PublishConfig
from inflight.messages import (
    Abort,
    AnyMessage,
    Commit,
    EngineHello,
    Enquire,
    Manifest,
    Prepare,
    RankHello,
    Refused,
    Welcome,
)
from inflight.messages.base import MAX_REASON
from inflight.weights import plan
from inflight.weights.publish.admission import mismatch, stranger
from inflight.weights.publish.channel import Channel
from inflight.weights.publish.delivery import GONE, Delivery, Event, Failure, Left, State, Superseded
from inflight.weights.transport.base import Sender, TransportError

log = logging.getLogger(__name__)

ENQUIRE_S = 1.0
"""How often members that are connected but have not said hello are asked for it."""


class Postbox(Protocol):
    """What the roster needs of a bus.Listener."""

    def send(self, peer: str, message: AnyMessage) -> None: ...
    def peers(self) -> set[str]: ...


class Roster:
    """The deliveries by generator, and what happened to them."""

    def __init__(
        self,
        postbox: Postbox,
        config: PublishConfig,
        kind: str,
        manifest: Manifest,
        ranks: dict[str, int],
        open_channel: Callable[[str, Sender], Channel],
        make_sender: Callable[[str, int, float], Sender],
        clock: Callable[[], float],
    ) -> None:
        self.publisher = secrets.token_hex(8)
        """Tells this publisher's versions from those that another one sent under the same numbers."""
        now = self._last_present = clock()
        self.deliveries = {name: Delivery(name, size, since=now, due=now) for name, size in ranks.items()}
        self.events: list[Event] = []
        self.ignored: Counter[str] = Counter()
        """Messages that did not fit the state, by type."""
        self.left_behind: list[Channel] = []
        """Closed channels whose threads may still be in a transfer."""
        self.manifest_digest = plan.digest(manifest)
        self._postbox, self._config, self._kind, self._manifest = postbox, config, kind, manifest
        self._open_channel, self._make_sender, self._clock = open_channel, make_sender, clock

    def of(self, peer: str) -> Delivery | None:
        """The delivery that a peer belongs to, by its identity `generator.member`; None for a stranger."""
        return self.deliveries.get(peer.rpartition(".")[0])

    def hello(self, peer: str, hello: RankHello | EngineHello, newest: int) -> None:
        """Takes a member in, or refuses it with the reason; `newest` is the trainer's version."""
        delivery = self.deliveries.get(hello.generator)
        if delivery is None or (reason := stranger(peer, hello, delivery)):
            reason = f"no generator of this run is named {hello.generator}" if delivery is None else reason
            self._refuse(peer, hello, reason)
            return
        if hello.incarnation != delivery.incarnation:
            self._replace(delivery, peer, hello.incarnation)
        if reason := mismatch(hello, delivery, newest):
            self._refuse(peer, hello, reason)
            self.give_up(delivery, "absent", f"{peer}: {reason}", end=True)
        elif delivery.state is State.INCOMPATIBLE:
            self.ignore(peer, hello, delivery.why)
        elif delivery.state is not State.ABSENT:
            self._again(delivery, peer, hello)
        else:
            delivery.held[peer] = self._held(hello)
            delivery.url = hello.url if isinstance(hello, EngineHello) else delivery.url
            self._admit(delivery, newest)

    def _refuse(self, peer: str, hello: RankHello | EngineHello, reason: str) -> None:
        self.ignore(peer, hello, reason)
        self.tell([peer], Refused(reason=reason))

    def _held(self, hello: RankHello | EngineHello) -> int | None:
        """A number of another publisher's names other weights, perhaps."""
        return hello.version if hello.publisher == self.publisher else None

    def _replace(self, delivery: Delivery, peer: str, incarnation: str) -> None:
        """A restarted generator takes the place of the one before."""
        if delivery.incarnation is not None:
            delivery.replaced.add(delivery.incarnation)
            self.leave(delivery, f"{peer} said hello after a restart")
        delivery.incarnation, delivery.asked_to_end = incarnation, False

    def _again(self, delivery: Delivery, peer: str, hello: RankHello | EngineHello) -> None:
        """A member that takes part says hello once more, because it was asked to or had lost us."""
        if delivery.state is not State.IDLE:
            self.ignore(peer, hello, f"it takes part already ({delivery.state.name})")  # what is out settles it
        elif self._held(hello) != delivery.held[peer]:
            self.leave(delivery, f"{peer} holds version {self._held(hello)}, not {delivery.held[peer]}")
        elif isinstance(hello, RankHello):
            self.open(delivery)  # it may have dropped its end of the transport

    def _admit(self, delivery: Delivery, newest: int) -> None:
        """→ IDLE when all members are there and agree."""
        versions = set(delivery.held.values())
        if delivery.missing:
            delivery.why = f"no hello from {', '.join(delivery.missing)}"
        elif len(versions) > 1:
            delivery.why = f"its members hold different versions: {delivery.held}"
            log.warning("%s: %s", delivery.generator, delivery.why)
        elif self.open(delivery):
            delivery.enter(State.IDLE, self._clock())
            delivery.asked_to_end, delivery.caught_up = False, versions == {newest}
            delivery.failures, delivery.trouble, delivery.retry_at = 0, "", 0.0
            held = versions.pop()
            holds = "no version yet" if held is None else f"version {held}"
            log.info("%s has joined with %s, the newest is %d", delivery.generator, holds, newest)

    def open(self, delivery: Delivery) -> bool:
        """A new transport, and a Welcome to it for every rank. False, leaving ABSENT, when it can't be opened."""
        self.drop_channel(delivery)
        size, timeout_s = delivery.world_size + 1, self._config.transfer_timeout_s
        try:
            sender = self._make_sender(self._kind, size, timeout_s)
        except TransportError as error:
            self.leave(delivery, str(error))
            return False
        delivery.channel = self._open_channel(delivery.generator, sender)
        for rank, peer in enumerate(delivery.ranks):
            welcome = Welcome(
                manifest=self._manifest, manifest_digest=self.manifest_digest, transport=self._kind,
                rendezvous=delivery.channel.rendezvous, transport_rank=rank + 1, transport_size=size,
                timeout_s=timeout_s, publisher=self.publisher,
            )  # fmt: skip
            self.tell([peer], welcome)
        return True

    def lost(self, peer: str, *, asked: bool = False) -> None:
        """A member is gone, and with it the generator; `asked`: since it was asked to end."""
        delivery = self.of(peer)
        if delivery is not None and peer in delivery.held:
            delivery.asked_to_end = asked
            self.leave(delivery, f"{peer} {'was asked to end' if asked else 'was lost'}")

    def leave(self, delivery: Delivery, reason: str) -> None:
        """→ ABSENT: what it holds is not claimed any more, and all its members must say hello (again)."""
        self._end_attempt(delivery, "receive", reason)
        self._enter_without_claim(delivery, State.ABSENT, reason)

    def give_up(self, delivery: Delivery, phase: str, reason: str, *, end: bool = False) -> None:
        """→ INCOMPATIBLE: neither waiting nor another version helps, only its restart or another publisher.

        `end`: the generator is of no use to this publisher in any case, so its engine is told to end.
        """
        if delivery.state in (State.POISONED, State.INCOMPATIBLE):
            return
        log.error("%s is of no use until it is restarted: %s", delivery.generator, reason)
        self._end_attempt(delivery, phase, reason)
        self._enter_without_claim(delivery, State.INCOMPATIBLE, reason)
        delivery.due = self._clock() if end else None

    def end_incompatible(self, delivery: Delivery) -> None:
        """Tells its engine why it has to end, and again while it is still connected."""
        delivery.due = self._clock() + ENQUIRE_S
        self.tell({delivery.engine} & self._postbox.peers(), Refused(reason=delivery.why[:MAX_REASON]))

    def _end_attempt(self, delivery: Delivery, phase: str, reason: str) -> None:
        version, state = delivery.version, delivery.state
        if version is not None and state in (State.SENDING, State.COMMITTING):
            self.record(delivery, version, "commit" if state is State.COMMITTING else phase, reason)
        if state is State.SENDING:
            self.tell_abort(delivery, delivery.ranks, reason)

    def poison(self, delivery: Delivery, peer: str, version: int, reason: str) -> None:
        """→ POISONED: only a restart brings it back. Its engine is told to end, if it still listens."""
        if delivery.state is State.POISONED:
            return
        self.record(delivery, version, "commit", f"poisoned, {peer}: {reason}")
        self._enter_without_claim(delivery, State.POISONED, f"{peer}: {reason}")
        self.tell({delivery.engine} & self._postbox.peers(), Refused(reason=f"{peer} may hold a torn version"))

    def refuse(self, generator: str, incarnation: str, reason: str) -> None:
        """→ INCOMPATIBLE, unless another start of the generator has taken the place of that one."""
        delivery = self.deliveries[generator]
        if delivery.state not in GONE and (delivery.incarnation or "") == incarnation:
            self.give_up(delivery, "absent", reason, end=True)

    def enquire(self, delivery: Delivery) -> None:
        """Asks those of an ABSENT generator that are connected to say hello.

        Whoever was cut off finds its way back by this, also when a hello got lost. A generator whose engine is there
        but not its ranks is broken inside; it is told to end once it has had the time of a transfer.
        """
        now, there = self._clock(), self._postbox.peers()
        delivery.due = now + ENQUIRE_S
        gone = [peer for peer in delivery.ranks if peer not in there]
        if gone and delivery.engine in there and now - delivery.since > self._config.transfer_timeout_s:
            reason = f"{', '.join(gone)} is not there since {now - delivery.since:.0f} s"
            log.warning("%s is told to end: %s", delivery.generator, reason)
            self.tell([delivery.engine], Refused(reason=reason))
        self.tell(there.intersection(delivery.missing or delivery.members), Enquire())

    def note_present(self) -> None:
        """To be called often, so that `deserted_s` counts from when the last generator left."""
        if any(delivery.state not in GONE for delivery in self.deliveries.values()):
            self._last_present = self._clock()

    def deserted_s(self) -> float:
        """For how long no generator has taken part; 0 while one does."""
        self.note_present()
        return self._clock() - self._last_present

    def drop_channel(self, delivery: Delivery) -> None:
        """Closes a delivery's channel and keeps its thread in sight until it has ended."""
        if delivery.channel is not None:
            delivery.channel.close()
            self.left_behind = [c for c in self.left_behind if not c.join(0)] + [delivery.channel]
            delivery.channel = None

    def record(self, delivery: Delivery, version: int, phase: str, reason: str) -> None:
        """Notes a version that a generator does not get (now: it may catch up)."""
        name, left = delivery.generator, delivery.asked_to_end
        level = logging.INFO if left else logging.WARNING
        log.log(level, "%s does not get version %d (%s): %s", name, version, phase, reason)
        self._settle(delivery, Left(name, version, reason) if left else Failure(name, version, phase, reason))

    def pass_over(self, delivery: Delivery, version: int, reason: str) -> None:
        """Notes a version that a generator does not get because a newer one is there."""
        log.info("%s is not sent version %d: superseded, %s", delivery.generator, version, reason)
        self._settle(delivery, Superseded(delivery.generator, version, reason))

    def _settle(self, delivery: Delivery, event: Failure | Superseded | Left) -> None:
        self.events.append(event)
        if delivery.owed == event.version:
            delivery.owed = None

    def ignore(self, peer: str, message: AnyMessage, reason: str) -> None:
        """Counts and logs a message that fits no state."""
        self.ignored[type(message).__name__] += 1
        log.warning("%s from %s is ignored: %s", type(message).__name__, peer, reason)

    def tell(self, peers: Iterable[str], message: AnyMessage) -> None:
        """Queues a message for each peer; one that is gone is reported by the bus as lost, which settles it."""
        for peer in peers:
            try:
                self._postbox.send(peer, message)
            except BusError as error:
                log.warning("%s", error)

    def tell_prepare(self, delivery: Delivery, sums: list[int]) -> None:
        """Tells ranks that the version that is out will come."""
        assert delivery.version is not None
        message = Prepare(
            version=delivery.version,
            attempt=delivery.attempt,
            manifest_digest=self.manifest_digest,
            checksums=sums,
            publisher=self.publisher,
        )
        self.tell(delivery.ranks, message)

    def tell_commit(self, delivery: Delivery, version: int) -> None:
        """Tells the engine that all ranks hold a version."""
        self.tell([delivery.engine], Commit(version=version, publisher=self.publisher))

    def tell_abort(self, delivery: Delivery, peers: Iterable[str], reason: str) -> None:
        """Tells ranks to let go of the version that is out."""
        assert delivery.version is not None
        self.tell(peers, Abort(version=delivery.version, attempt=delivery.attempt, reason=reason[:MAX_REASON]))

    def _enter_without_claim(self, delivery: Delivery, state: State, reason: str) -> None:
        self.drop_channel(delivery)
        delivery.held.clear()
        delivery.caught_up = False
        now = self._clock()
        delivery.enter(state, now, reason, due=now if state is State.ABSENT else None)
        if delivery.owed is not None:
            self.record(delivery, delivery.owed, "absent", f"{state.name}, {reason}")
