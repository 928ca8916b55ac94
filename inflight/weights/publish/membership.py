"""Membership: generators join when all their ranks and their engine have said hello, leave, and are refused.

Not thread-safe: the loop calls in under its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from inflight.messages import Enquire, RankHello
from inflight.weights.publish.members import Hello
from inflight.weights.publish.replica import Replica
from inflight.weights.publish.session import Session
from inflight.weights.publish.states import ReplicaState

log = logging.getLogger(__name__)

ENQUIRE_S = 1.0
"""The interval at which members that are connected but have not said hello are asked for it."""


class Membership:
    """The replicas by generator; accepts their members and removes them."""

    def __init__(self, session: Session, ranks: Mapping[str, int], guest_ranks: int = 0) -> None:
        """`ranks` is generator name → world size, of those that are expected; `guest_ranks` is the world size of others
        that may join, 0: none may."""
        self.replicas = {name: Replica(name, size, session) for name, size in ranks.items()}
        self._expected = frozenset(ranks)
        self._guest_ranks = guest_ranks
        self._session = session
        self._last_present = session.clock()
        self._without_ranks: dict[str, float] = {}
        """Generator → since when its engine is seen without all of its ranks."""

    def of(self, peer: str) -> Replica | None:
        """The replica that a peer belongs to, by its identity `generator.member`; None for an unknown peer."""
        return self.replicas.get(peer.rpartition(".")[0])

    def hello(self, peer: str, hello: Hello, newest: int) -> None:
        """Accepts a member, or refuses it with the reason; `newest` is the trainer's version."""
        replica = self.replicas.get(hello.generator) or self._guest(peer, hello.generator)
        if replica is None:
            self._refuse(peer, hello, f"no generator of this run is named {hello.generator}")
            return
        members = replica.members
        objection = members.objection(peer, hello)
        if not objection and replica.state is ReplicaState.POISONED and hello.incarnation == members.incarnation:
            objection = f"it may hold a torn version ({replica.reason}): it must be restarted"
        if objection:
            self._refuse(peer, hello, objection)
            return
        if hello.incarnation != members.incarnation:
            self._replace(replica, peer, hello.incarnation)
        held = hello.version if hello.publisher == self._session.publisher else None
        if mismatch := members.mismatch(hello, newest) or self._objection(hello):
            self._refuse(peer, hello, mismatch)
            replica.give_up("absent", f"{peer}: {mismatch}", end=True)
        elif replica.state is ReplicaState.INCOMPATIBLE:
            self._session.outbox.ignore(peer, hello, replica.reason)
        elif replica.state is ReplicaState.ABSENT:
            members.note(peer, hello, held)
            self._admit(replica, newest)
        else:
            self._repeated(replica, peer, hello, held)

    def _guest(self, peer: str, name: str) -> Replica | None:
        """A replica for one that is not expected; None when none may join. The launcher decides how many may, and gives
        each a name and a key of its own; the bus has checked the key."""
        if not self._guest_ranks or peer.rpartition(".")[0] != name:
            return None
        self.replicas[name] = Replica(name, self._guest_ranks, self._session)
        return self.replicas[name]

    def _forget_guests(self) -> None:
        """Those that have left: they come back, if ever, under other names."""
        away = [name for name, each in self.replicas.items() if name not in self._expected and not each.state.present]
        connected = self._session.outbox.peers() if away else set()
        for name in away:
            if connected.isdisjoint(self.replicas[name].members.all):
                log.info("%s has left", name)
                del self.replicas[name]
                self._without_ranks.pop(name, None)

    def _objection(self, hello: Hello) -> str:
        """Why no transport leads to a rank; empty when one does."""
        place = hello.place if isinstance(hello, RankHello) else None
        if place is None:
            return ""
        there = (release for replica in self.replicas.values() if (release := replica.members.vllm))
        return self._session.choice.objection(place, self._session.manifest.checksum, next(there, ""))

    def _refuse(self, peer: str, hello: Hello, reason: str) -> None:
        self._session.outbox.ignore(peer, hello, reason)
        self._session.outbox.send_refusal(peer, reason)

    @staticmethod
    def _replace(replica: Replica, peer: str, incarnation: str) -> None:
        """Handles the hello of a restarted generator, which replaces the start before."""
        known = replica.members.incarnation is not None
        replica.members.replace(incarnation)
        if known:
            replica.leave(f"{peer} said hello after a restart")

    @staticmethod
    def _admit(replica: Replica, newest: int) -> None:
        """→ IDLE when all members are present and agree."""
        members = replica.members
        if members.missing:
            replica.incomplete(f"no hello from {', '.join(members.missing)}")
        elif len(set(members.held.values())) > 1:
            replica.incomplete(f"its members hold different versions: {members.held}")
            log.warning("%s: %s", replica.generator, replica.reason)
        elif replica.join(newest):
            holds = "no version yet" if members.version is None else f"version {members.version}"
            log.info("%s has joined with %s, the newest is %d", replica.generator, holds, newest)

    def _repeated(self, replica: Replica, peer: str, hello: Hello, held: int | None) -> None:
        """A member says hello again, because it was requested or the member had lost the publisher."""
        if replica.state is not ReplicaState.IDLE:  # the outcome of the current attempt settles it
            self._session.outbox.ignore(peer, hello, f"it takes part already ({replica.state.name})")
        elif held != (known := replica.members.held[peer]):
            replica.leave(f"{peer} holds version {held}, not {known}")
        elif isinstance(hello, RankHello):
            replica.reopen()  # the member may have closed its side of the transport

    def lost(self, peer: str, *, asked: bool) -> None:
        """The bus has lost a member, and with it the generator is gone; `asked`: it was asked to end."""
        replica = self.of(peer)
        if replica is not None and peer in replica.members.held:
            reason = f"{peer} was asked to end" if asked else f"{peer} was lost"
            replica.leave(reason, asked=asked or replica.generator not in self._expected)

    def dismiss(self, generator: str, incarnation: str, reason: str) -> None:
        """→ INCOMPATIBLE, unless another start of the generator has replaced that one."""
        replica = self.replicas[generator]
        if replica.state.present and (replica.members.incarnation or "") == incarnation:
            replica.give_up("absent", reason, end=True)

    def expire(self) -> None:
        """Carries out what is due for generators that are not present; to be called often."""
        self._forget_guests()
        now = self._session.clock()
        for replica in self.replicas.values():
            if replica.state.present:
                self._without_ranks.pop(replica.generator, None)
                continue
            if replica.due is None or now < replica.due:
                continue
            replica.postpone(now + ENQUIRE_S)
            if replica.state is ReplicaState.ABSENT:
                self.enquire(replica)
            else:  # INCOMPATIBLE: repeated while it is still connected
                self._session.outbox.send_refusal(replica.members.engine, replica.reason)
        self.deserted_s()

    def enquire(self, replica: Replica) -> None:
        """Requests a hello from the connected members of an ABSENT generator.

        This is how a disconnected member rejoins, also if its hello was lost. A generator whose engine is present but
        not its ranks is broken; its engine is refused, and ends, after the time of a transfer.
        """
        members = replica.members
        connected = self._session.outbox.peers()
        gone = [peer for peer in members.ranks if peer not in connected]
        if gone and members.engine in connected:
            now = self._session.clock()
            since = now - self._without_ranks.setdefault(replica.generator, now)
            if since > self._session.config.transfer_timeout_s:
                reason = f"{', '.join(gone)} is not there since {since:.0f} s"
                log.warning("%s is refused, and ends: %s", replica.generator, reason)
                self._session.outbox.send_refusal(members.engine, reason)
        else:
            self._without_ranks.pop(replica.generator, None)
        self._session.outbox.send(connected.intersection(members.missing or members.all), Enquire())

    def deserted_s(self) -> float:
        """Seconds for which no generator was present; 0 while one is. Brief presence does not count."""
        now = self._session.clock()
        if any(replica.state.present for replica in self.replicas.values()):
            self._last_present = now
        return now - self._last_present
