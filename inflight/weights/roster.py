"""Who takes part: generators whose ranks and engine have said hello, each with a transport of its own.

Not thread-safe: the dispatch calls in under its lock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from inflight.bus import BusError, Listener
from inflight.config import PublishConfig
from inflight.messages import Abort, AnyMessage, EngineHello, Manifest, RankHello, Refused, Welcome
from inflight.weights import plan
from inflight.weights.channel import Channel
from inflight.weights.delivery import Delivery, Failure, State, Swap
from inflight.weights.transport import make_sender
from inflight.weights.transport.base import TransportError

log = logging.getLogger(__name__)


class Roster:
    """The deliveries by generator, what they have committed, and what happened to them."""

    def __init__(
        self,
        listener: Listener,
        config: PublishConfig,
        kind: str,
        manifest: Manifest,
        ranks: dict[str, int],
        channel_failed: Callable[[Channel, TransportError], None],
    ) -> None:
        self.deliveries = {name: Delivery(name, world_size) for name, world_size in ranks.items()}
        self.committed: dict[str, int] = {}
        """Generator → the version that its engine said it stamps; absent when that is not known for certain."""
        self.events: list[Swap | Failure] = []
        self.ignored: Counter[str] = Counter()
        """Messages that did not fit the state, by type."""
        self.left_behind: list[Channel] = []
        """Closed channels whose threads may still be in a transfer."""
        self.manifest_digest = plan.digest(manifest)
        self._listener, self._config, self._kind, self._manifest = listener, config, kind, manifest
        self._channel_failed = channel_failed

    def of(self, peer: str) -> Delivery | None:
        """The delivery that a peer belongs to, by its identity `generator.member`; None for a stranger."""
        return self.deliveries.get(peer.rpartition(".")[0])

    def hello(self, peer: str, hello: RankHello | EngineHello, newest: int) -> None:
        """Takes a member in, or refuses it with the reason; `newest` is the trainer's version."""
        delivery = self.deliveries.get(hello.generator)
        if delivery is None or (reason := _objection(peer, hello, delivery, newest)):
            reason = f"no generator of this run is named {hello.generator}" if delivery is None else reason
            self.ignore(peer, hello, reason)
            self.tell([peer], Refused(reason=reason))
            return
        if peer in delivery.held or delivery.state is not State.ABSENT:
            self.leave(delivery, f"{peer} said hello again")
        delivery.held[peer] = hello.version
        versions = set(delivery.held.values())
        if delivery.missing:
            delivery.why = f"no hello from {', '.join(delivery.missing)}"
        elif len(versions) > 1:
            delivery.why = f"its members hold different versions: {delivery.held}"
            log.warning("%s: %s", delivery.generator, delivery.why)
        elif self.open(delivery):
            delivery.enter(State.IDLE)
            self.committed[delivery.generator] = versions.pop()

    def open(self, delivery: Delivery) -> bool:
        """A new transport, and a Welcome to it for every rank. False, leaving ABSENT, when it can't be opened."""
        self.drop_channel(delivery)
        size, timeout_s = delivery.world_size + 1, self._config.transfer_timeout_s
        try:
            sender = make_sender(self._kind, size, timeout_s)
        except TransportError as error:
            self.leave(delivery, str(error))
            return False
        delivery.channel = Channel(delivery.generator, sender, self._channel_failed)
        for rank, peer in enumerate(delivery.ranks):
            welcome = Welcome(
                manifest=self._manifest, manifest_digest=self.manifest_digest, transport=self._kind,
                rendezvous=delivery.channel.rendezvous, transport_rank=rank + 1, transport_size=size,
                timeout_s=timeout_s,
            )  # fmt: skip
            self.tell([peer], welcome)
        return True

    def lost(self, peer: str) -> None:
        """A member is gone, and with it the generator."""
        delivery = self.of(peer)
        if delivery is not None and peer in delivery.held:
            self.leave(delivery, f"{peer} was lost")

    def leave(self, delivery: Delivery, reason: str) -> None:
        """→ ABSENT: what it holds is not claimed any more.

        All its members must say hello again, not only the one that was lost: a generator's processes live and die
        together, and what the others said before may be of an incarnation that is about to be lost as well.
        """
        version, state = delivery.version, delivery.state
        if version is not None and state in (State.SENDING, State.COMMITTING):
            self.record(delivery, version, "commit" if state is State.COMMITTING else "receive", reason)
        if version is not None and state is State.SENDING:
            self.tell(delivery.ranks, Abort(version=version, reason=reason))
        self._enter_without_claim(delivery, State.ABSENT, reason)

    def poison(self, delivery: Delivery, peer: str, version: int, reason: str) -> None:
        """→ POISONED: only a hello of all its members, restarted, brings it back."""
        if delivery.state is not State.POISONED:
            self.record(delivery, version, "commit", f"poisoned, {peer}: {reason}")
        self._enter_without_claim(delivery, State.POISONED, f"{peer}: {reason}")

    def drop_channel(self, delivery: Delivery) -> None:
        """Closes a delivery's channel and keeps its thread in sight until it has ended."""
        if delivery.channel is not None:
            delivery.channel.close()
            self.left_behind = [c for c in self.left_behind if not c.join(0)] + [delivery.channel]
            delivery.channel = None

    def record(self, delivery: Delivery, version: int, phase: str, reason: str) -> None:
        """Notes a version that a generator does not get."""
        log.warning("%s does not get version %d (%s): %s", delivery.generator, version, phase, reason)
        self.events.append(Failure(delivery.generator, version, phase, reason))

    def ignore(self, peer: str, message: AnyMessage, reason: str) -> None:
        """Counts and logs a message that fits no state."""
        self.ignored[type(message).__name__] += 1
        log.warning("%s from %s is ignored: %s", type(message).__name__, peer, reason)

    def tell(self, peers: Iterable[str], message: AnyMessage) -> None:
        """Queues a message for each peer; one that is gone is reported by the bus as lost, which settles it."""
        for peer in peers:
            try:
                self._listener.send(peer, message)
            except BusError as error:
                log.warning("%s", error)

    def _enter_without_claim(self, delivery: Delivery, state: State, reason: str) -> None:
        self.drop_channel(delivery)
        self.committed.pop(delivery.generator, None)
        delivery.held.clear()
        delivery.enter(state, reason)


def _objection(peer: str, hello: RankHello | EngineHello, delivery: Delivery, newest: int) -> str:
    """Why a hello is refused; empty when it is not."""
    if hello.world_size != delivery.world_size:
        return f"world_size is {hello.world_size}, this run expects {delivery.world_size}"
    if isinstance(hello, RankHello) and hello.rank >= delivery.world_size:
        return f"rank {hello.rank} of {delivery.world_size}"
    expected = delivery.ranks[hello.rank] if isinstance(hello, RankHello) else delivery.engine
    if peer != expected:
        return f"{peer} can't speak for {expected}"
    if hello.version > newest:
        return f"version {hello.version} is ahead of the trainer's, {newest}"
    return ""
