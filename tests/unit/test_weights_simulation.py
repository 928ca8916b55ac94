"""Publisher, ranks and engines in one thread, with a network and a clock that hypothesis plays against them.

The real state machines of both sides (PublishProtocol, WeightReceiver, EngineAgent) talk over lists of messages that
may be delivered late, out of order, twice or never; processes die, are cut off and restarted; the publisher too is
replaced, by one that begins at a version higher than, equal to or lower than what generators hold, with other weights;
ranks fail in each phase; versions are published all the while. Whatever happens:

* a rank's live weights are one version, whole, and are the version that it claims;
* an engine commits a version only when all its ranks hold it, and stamps none that they don't hold;
* nothing is claimed for a generator, nor routed to it, that is not so;
* a generator whose version is pinned gets no Commit of another one, and may be sent newer ones;
* no transition but the legal ones happens (both sides raise AssertionError);
* each version has an outcome at each generator, and once the network behaves all generators get the newest.
"""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
from fake_generator import FakeShadow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.bus import BusError
from inflight.config import PublishConfig
from inflight.generator.agent import EngineAgent, GeneratorEnded
from inflight.messages import Abort, Commit, Committed, EngineHello, Failed, RankHello, RankSwapped, Ready
from inflight.types import ParamMeta
from inflight.weights.pack import checksums
from inflight.weights.plan import plan
from inflight.weights.publish.events import Failure, Superseded, Swap
from inflight.weights.publish.finite import NotFinite
from inflight.weights.publish.outbox import Outbox
from inflight.weights.publish.protocol import PublishProtocol
from inflight.weights.publish.routes import routes
from inflight.weights.publish.session import Session
from inflight.weights.receive.rank_state import ReceiverState
from inflight.weights.receive.receiver import WeightReceiver
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.choice import TransportChoice

MANIFEST = plan([ParamMeta(name="w", shape=(40,), dtype="float32")], {}, 100, "crc32")
CONFIG = PublishConfig(transfer_timeout_s=10, commit_timeout_s=5, supersede_after_s=2, retry_after_s=1, max_behind=2)
RANKS = {"g0": 2, "g1": 1}
GLOO = TransportChoice("gloo", torch.device("cpu"))
DEAD_AFTER_S = 8.0


STARTED_WITH = 255
"""What all bytes are of a generator that no publisher has sent anything yet."""


def value_of(publisher, version):
    """What all bytes of a version are: the same number of another publisher is another set of weights."""
    return (37 * publisher + version) % STARTED_WITH


def bytes_of(value):
    return torch.full((MANIFEST.total_bytes,), value, dtype=torch.uint8)


class Net:
    """Messages on their way, by direction and peer; a peer is heard of while it is connected."""

    def __init__(self):
        self.to_publisher = []
        self.to_peer = {}
        self.connected = set()
        self.said_ready = set()
        """(rank, version, attempt, digest) of every Ready that was ever sent."""
        self.reports = []
        """(rank, message) of every RankSwapped that was ever sent, in order."""
        self.on_commit = lambda peer, version: None

    def send(self, peer, message):  # the publisher's
        if peer not in self.connected:
            raise BusError(f"{peer} is not connected")
        if isinstance(message, Commit):
            self.on_commit(peer, message.version)
        self.to_peer[peer].append(message)

    def peers(self):
        return set(self.connected)


class PeerLink:
    """A rank's or an engine's end."""

    def __init__(self, net, peer):
        self.net, self.peer = net, peer
        self.now = []

    def send(self, message):
        if isinstance(message, Ready):
            self.net.said_ready.add((self.peer, message.version, message.attempt, message.digest))
        if isinstance(message, RankSwapped):
            self.net.reports.append((self.peer, message))
        if self.peer in self.net.connected:
            self.net.to_publisher.append((self.peer, message))

    def receive(self, timeout_s):
        return self.now.pop(0) if self.now else None

    def close(self):
        pass


class Wire:
    """The sender of one transport: what it offers, and whether it was closed."""

    def __init__(self, number):
        self.rendezvous, self.offered, self.closed = str(number), None, False

    def close(self):
        self.closed = True


class Channel:
    """In place of the sending thread: its jobs are run by the simulation, in the order of all channels' jobs."""

    def __init__(self, wire, jobs):
        self.wire, self.rendezvous, self.error, self._jobs = wire, wire.rendezvous, None, jobs

    def submit(self, attempt):
        self._jobs.append((self, attempt))

    def close(self):
        self.wire.closed = True


class Channels:
    """Opens them."""

    def __init__(self, world):
        self.world = world

    def open(self, generator, world_size, kind):
        self.world.wires.append(Wire(len(self.world.wires)))
        return Channel(self.world.wires[-1], self.world.jobs)

    def close(self, channel):
        channel.close()


class Offer:
    """A version of the publisher with this number."""

    unsound = None

    def __init__(self, publisher, version, *, checked):
        self.publisher, self.version, self.checked = publisher, version, checked

    def sums(self, *, follow):
        return checksums(MANIFEST, bytes_of(value_of(self.publisher, self.version)))


class Receiving:
    """A rank's end of a Wire."""

    def __init__(self, world, welcome):
        self.world, self.wire = world, world.wires[int(welcome.rendezvous)]

    def receive(self, buffer, buckets):
        if self.wire.closed or self.wire.offered is None:
            raise TransportError("receive: closed")
        buffer.copy_(bytes_of(value_of(*self.wire.offered)))
        if self.world.corrupt:
            self.world.corrupt = False
            buffer[3] ^= 1

    def close(self):
        self.wire.closed = True


class Generator:
    """One incarnation: ranks and an engine, that live and die together."""

    def __init__(self, world, name, number):
        self.world, self.name, self.alive, self.stamped = world, name, True, None
        self.stale_prefixes = False
        """The prefix cache has KV of other weights under the number that is stamped."""
        self.incarnation = f"{number:016x}"
        self.shadows, self.receivers = [], []
        for rank in range(RANKS[name]):
            shadow = FakeShadow()
            shadow.live = {"w": bytes_of(STARTED_WITH)[:160].view(torch.float32)}
            hello = RankHello(generator=name, rank=rank, world_size=RANKS[name], incarnation=self.incarnation)
            link = PeerLink(world.net, f"{name}.r{rank}")
            receiver = WeightReceiver(link, shadow, hello, connect=lambda welcome: Receiving(world, welcome))
            self.shadows.append(shadow)
            self.receivers.append(receiver)
        hello = EngineHello(generator=name, world_size=RANKS[name], url="http://x", incarnation=self.incarnation)
        engine = SimpleNamespace(
            engine_core=SimpleNamespace(call_utility_async=self._call),
            output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 1),
        )
        self.agent = EngineAgent(PeerLink(world.net, f"{name}.engine"), engine, hello, commit_timeout_s=5)
        for peer in self.peers:
            world.net.connected.add(peer)
            world.net.to_peer[peer] = []
        for receiver in self.receivers:
            receiver._hello()
        self.agent.link.send(hello)

    @property
    def peers(self):
        return [*(f"{self.name}.r{rank}" for rank in range(RANKS[self.name])), f"{self.name}.engine"]

    async def _call(self, method, *arguments):
        match method, arguments:
            case "commit_weights", (version,):
                assert self.stamped is None or version > self.stamped  # else vLLM's patched core raises
                self.stamped = version  # the core schedules no step between this and the call to its ranks
                return self._commit(version)
            case "collective_rpc", ("commit_weights", None, (version,)):
                assert version == self.stamped
                self.stale_prefixes = True
                return self._commit(version)
            case "reset_prefix_cache", (True,):
                self.stale_prefixes = False
                return True

    def _commit(self, version):
        """As vLLM's core and InflightWorkerMixin.commit_weights do. What ranks report may be heard before the next one
        swaps, and before the engine knows that any has."""
        answers = []
        for receiver in self.receivers:
            try:
                answers.append({"gap_s": receiver.swap(version)})
            except Exception as error:  # noqa: BLE001 - as the worker does
                answers.append({"error": str(error)})
            self.world.overhear(self)
        return answers

    def take(self, peer, message):
        """A member handles one message."""
        try:
            if peer.endswith(".engine"):
                asyncio.run(self.agent._obey(message))
            else:
                receiver = self.receivers[int(peer.rpartition(".r")[2])]
                receiver._publisher.link.now.append(message)
                receiver._step()
        except GeneratorEnded:
            self.die()
        except AssertionError:
            raise
        except Exception:  # noqa: BLE001 - the receiver's thread would end: so does the process, in the end
            self.die()

    def die(self):
        self.alive = False
        for peer in self.peers:
            self.world.net.connected.discard(peer)
            self.world.net.to_peer.pop(peer, None)


class World:
    """All of it."""

    def __init__(self):
        self.now, self.net, self.wires, self.corrupt = 0.0, Net(), [], False
        self.at_once = True
        """Whether the publisher hears ranks while their engine still commits."""
        self.engines_late = False
        """Whether what engines answer arrives long after all that ranks have sent."""
        self.checks_late = False
        """Whether the check for NaN and Inf takes longer than anything else."""
        self.seen = None
        """An AssertionError that was raised within an engine, which takes it for a failure of vLLM."""
        self.births = 0
        self.net.on_commit = self._committing
        self.generators = {}
        self.logs = []
        self.publishers = []
        """The publishers so far; the last one lives."""
        self.begin_publisher(0)
        for name in RANKS:
            self.restart(name)

    def begin_publisher(self, version):
        """The first one, or one that takes the place of another."""
        self.jobs, self.checks, self.net.to_publisher, self.began = [], [], [], version
        for wire in self.wires:
            wire.closed = True
        self.session = Session(CONFIG, MANIFEST, Outbox(self.net), Channels(self), GLOO, clock=lambda: self.now)
        self.logs.append(self.session.events)
        self.publishers.append(self.session.publisher)
        self.protocol = PublishProtocol(self.session, RANKS, self._offer(version, checked=True))
        self.replicas = self.protocol.membership.replicas
        self.pin = None

    def _offer(self, version, *, checked=False):
        return Offer(len(self.publishers) - 1, version, checked=checked)

    def release(self, version):
        offer = self._offer(version)
        self.protocol.release(offer)
        self.checks.append(offer)

    def run_check(self):
        offer = self.checks.pop(0)
        offer.checked = True
        self.protocol.checked(offer)

    def run_job(self):
        channel, attempt = self.jobs.pop(0)
        if not channel.wire.closed and attempt.announce():
            channel.wire.offered = (attempt.offer.publisher, attempt.offer.version)

    # --- what may happen --------------------------------------------------------------------------------------------

    def publish(self):
        if self.protocol.withdraw(supersede=True):
            self.release(self.protocol.version + 1)

    def keep(self, ago, timeout_s, *, routed=True):
        """Pins one of the newest versions, unless one is pinned."""
        if self.pin is None or self.pin.ended:
            self.pin = self.protocol.pin(max(0, self.protocol.version - ago), timeout_s, routed=routed)
        return self.pin

    def unpin(self):
        if self.pin is not None:
            self.protocol.unpin(self.pin, "done")

    def restart(self, name):
        if name in self.generators and self.generators[name].alive:
            self.generators[name].die()
        self.births += 1
        self.generators[name] = Generator(self, name, self.births)

    def lose(self, peer):
        """The bus takes a peer for dead; it may well live."""
        self.net.connected.discard(peer)
        self.protocol.lost(peer)

    def heal(self):
        for generator in self.generators.values():
            if generator.alive:
                self.net.connected.update(generator.peers)

    def step(self, move, index):
        inbound, boxes = self.net.to_publisher, [p for p, box in self.net.to_peer.items() if box]
        alive = [g for g in self.generators.values() if g.alive]
        match move:
            case "up" if inbound:
                self._hear_next()
            case "up, out of order" if inbound:
                self._hear(*inbound.pop(index % len(inbound)))
            case "up, twice" if inbound:
                self._hear(*inbound[index % len(inbound)])
            case "up, lost" if inbound:
                inbound.pop(index % len(inbound))
            case "down" if boxes:
                self._give(boxes[index % len(boxes)], 0)
            case "down, out of order" if boxes:
                peer = boxes[index % len(boxes)]
                self._give(peer, index % len(self.net.to_peer[peer]))
            case "down, twice" if boxes:
                peer = boxes[index % len(boxes)]
                self.net.to_peer[peer].insert(0, self.net.to_peer[peer][0])
            case "down, lost" if boxes:
                self.net.to_peer[boxes[index % len(boxes)]].pop(0)
            case "job" if self.jobs:
                self.run_job()
            case "check" if self.checks:
                self.run_check()
            case "checks take long, or not":
                self.checks_late = not self.checks_late
            case "all is well for a while":
                self.drain(60)
            case "publish":
                self.publish()
            case "pin":
                self.keep(index // 3, (4, 30)[index % 2], routed=index % 3 > 0)
            case "unpin":
                self.unpin()
            case "time":
                self.now += (0.5, 2.0, 6.0, 11.0)[index % 4]
                self.protocol.expire()
            case "cut off" if alive:
                generator = alive[index % len(alive)]
                self.lose(generator.peers[index % len(generator.peers)])
            case "heal":
                self.heal()
            case "kill" if alive:
                generator = alive[index % len(alive)]
                generator.die()
                for peer in generator.peers:
                    self.protocol.lost(peer)
            case "another publisher" if index < 3:  # seldom: all that was reached begins anew
                self.begin_publisher(max(0, self.protocol.version + (0, 1, -2)[index]))
            case "restart":
                self.restart(list(RANKS)[index % len(RANKS)])
            case "rank fails" if alive:
                generator = alive[index % len(alive)]
                phase = ("begin", "build", "swap")[index % 3]
                generator.shadows[index % len(generator.shadows)].fail[phase] = RuntimeError(phase)
            case "rank recovers":
                for generator in alive:
                    for shadow in generator.shadows:
                        shadow.fail.clear()
            case "corrupt":
                self.corrupt = True
            case "ranks are heard at once, or not":
                self.at_once = not self.at_once
            case "engines are heard late, or not":
                self.engines_late = not self.engines_late
            case "up, old reports":
                for peer, message in self.net.reports[-2 * (1 + index) :]:
                    self._hear(peer, message)
            case "transport breaks":
                open_ = [replica.channel for replica in self.replicas.values() if replica.channel is not None]
                if open_:
                    channel = open_[index % len(open_)]
                    channel.wire.closed, channel.error = True, TransportError("send: broken")
        self.check()

    def _hear(self, peer, message):
        self.protocol.hear(peer, message)

    def _in_time(self):
        """Which messages to the publisher are not held up."""
        inbound = enumerate(self.net.to_publisher)
        return [at for at, (_, message) in inbound if not (self.engines_late and isinstance(message, Committed))]

    def _hear_next(self):
        self._hear(*self.net.to_publisher.pop((self._in_time() or [0])[0]))

    def overhear(self, generator):
        """What the ranks of a generator have sent arrives, while its engine is in the middle of a commit."""
        if self.at_once:
            arrived = [each for each in self.net.to_publisher if each[0] in generator.peers[:-1]]
            self.net.to_publisher = [each for each in self.net.to_publisher if each not in arrived]
            try:
                for peer, message in arrived:
                    self._hear(peer, message)
                    self.check()
            except AssertionError as error:
                self.seen = error

    def _give(self, peer, at):
        message = self.net.to_peer[peer].pop(at)
        generator = self.generators[peer.partition(".")[0]]
        if generator.alive:
            generator.take(peer, message)

    def _committing(self, engine, version):
        """Commit is sent only when every rank has said of this very attempt that it is ready, of a version that was
        checked, and not over a pin."""
        replica = self.replicas[engine.partition(".")[0]]
        assert replica.pin is None
        attempt = replica.attempt
        assert attempt.offer.checked
        ready = {(rank, version, attempt.number, attempt.digest) for rank in replica.members.ranks}
        assert ready <= self.net.said_ready

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check(self):
        if self.seen is not None:
            raise self.seen
        for generator in (g for g in self.generators.values() if g.alive):
            for shadow, receiver in zip(generator.shadows, generator.receivers, strict=True):
                live = shadow.live["w"].view(torch.uint8).unique().tolist()
                assert live == [self._claimed(receiver)]  # whole, and what it claims
        for name, replica in self.replicas.items():
            generator = self.generators[name]
            claimed = replica.committed
            current = generator.alive and generator.incarnation == replica.members.incarnation
            if claimed is not None and current and replica.state.name not in ("COMMITTING",):
                held = {self._claimed(receiver) for receiver in generator.receivers}
                assert held == {value_of(len(self.publishers) - 1, claimed)}, (name, vars(replica), held)
                assert not generator.stale_prefixes
                assert generator.agent.commits.version is not None  # else it answers 503 (first_version.py)
            bounded = replica.state.name not in ("IDLE", "POISONED")
            assert replica.due is not None or not bounded  # nothing waits forever
        self._check_pin()
        for name, route in routes(self.protocol.version, self.replicas.values(), 2).generators.items():
            pin = self.replicas[name].pin
            assert pin.routed if pin is not None else self.protocol.version - route.version <= 2

    def _check_pin(self):
        """At most one generator has it, and stamps its version."""
        holders = [replica for replica in self.replicas.values() if replica.pin is not None]
        pinned = self.pin is not None and self.pin.generator and not self.pin.ended
        assert [replica.generator for replica in holders] == ([self.pin.generator] if pinned else [])
        for replica in holders:
            assert replica.pin is self.pin
            assert replica.committed == self.pin.version
            generator = self.generators[replica.generator]
            if generator.alive and generator.incarnation == replica.members.incarnation:
                assert generator.stamped == self.pin.version

    def _claimed(self, receiver):
        if receiver.version is None:
            return STARTED_WITH
        return value_of(self.publishers.index(receiver._rank_state.publisher), receiver.version)

    def drain(self, count):
        """What is on its way arrives, in order."""
        for _ in range(count):
            boxes = [p for p, box in self.net.to_peer.items() if box]
            if self.checks and not self.checks_late:
                self.run_check()
            elif self.jobs:
                self.run_job()
            elif boxes:
                self._give(boxes[0], 0)
            elif self._in_time():
                self._hear_next()
            elif self.checks:
                self.run_check()
            else:
                return
            self.check()

    def calm(self):
        """From now on nothing is lost, time goes by, and what died is started again."""
        self.engines_late = False
        for round_ in range(80):
            self.heal()
            for name, generator in list(self.generators.items()):
                for shadow in generator.shadows:
                    shadow.fail.clear()
                if not generator.alive or any(r.state is ReceiverState.POISONED for r in generator.receivers):
                    for peer in generator.peers:
                        self.protocol.lost(peer)
                    self.restart(name)
            self.drain(200)
            self.now += 1.5
            self.protocol.expire()
            newest = self.protocol.version
            if {replica.committed for replica in self.replicas.values()} == {newest}:
                return round_
        states = {name: (each.state.name, each.reason, each.members.held) for name, each in self.replicas.items()}
        raise AssertionError(f"not all came to version {self.protocol.version}: {states}")


MOVES = [
    *["up"] * 30,
    *["down"] * 40,
    *["job"] * 15,
    *["check"] * 3,
    "checks take long, or not",
    *["publish"] * 3,
    *["time"] * 5,
    *["heal"] * 3,
    *["all is well for a while"] * 8,
    *["pin"] * 3,
    "unpin",
    "up, out of order",
    "up, twice",
    "up, lost",
    "down, out of order",
    "down, twice",
    "down, lost",
    "another publisher",
    "cut off",
    "heal",
    "heal",
    "kill",
    *["restart"] * 3,
    "rank fails",
    "rank recovers",
    "corrupt",
    "transport breaks",
    *["ranks are heard at once, or not"] * 2,
    "engines are heard late, or not",
    *["up, old reports"] * 4,
]


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 5)), max_size=160))
def test_whatever_happens_live_is_whole_and_in_the_end_all_have_the_newest(moves):
    play(moves)


@pytest.mark.parametrize("seed", range(40))
def test_long_histories(seed):
    """Longer than hypothesis tries; enough goes well in them that faults meet every phase."""
    chance = random.Random(seed)
    world = play([(chance.choice(MOVES), chance.randrange(6)) for _ in range(1500)])
    events = [event for log in world.logs for event in log.since(0)]
    assert len([event for event in events if isinstance(event, Swap)]) > 5
    assert {event.phase for event in events if isinstance(event, Failure)} >= {"receive", "absent"}


def play(moves):
    world = World()
    for move, index in moves:
        world.step(move, index)
    world.calm()
    # Every version has an outcome at every generator (of a version that was passed over: superseded or absent).
    world.now += 60
    world.protocol.expire()
    assert world.protocol.settled()
    for name in RANKS:
        told = {e.version for e in world.session.events.since(0) if e.generator == name}
        assert told >= set(range(world.began + 1, world.protocol.version + 1)), (name, world.session.events.since(0))
    return world


@pytest.mark.parametrize("lost", range(13))
def test_each_single_message_may_be_lost(lost):
    """The way of one version at a time, with the n-th message of all gone."""
    world, count = World(), 0
    world.calm()
    world.at_once = False
    world.publish()
    for _ in range(100):
        boxes = [p for p, box in world.net.to_peer.items() if box]
        if world.jobs or world.checks:
            world.step("job" if world.jobs else "check", 0)
            continue
        if not boxes and not world.net.to_publisher:
            break
        down = bool(boxes)
        world.step(("down" if down else "up") + (", lost" if count == lost else ""), 0)
        count += 1
    assert count > lost
    assert world.calm() < 20


def test_an_abort_that_is_lost_is_repeated():
    world = World()
    world.calm()
    world.generators["g0"].shadows[0].fail["build"] = RuntimeError("no room")
    world.publish()
    box = world.net.to_peer["g0.r1"]
    for _ in range(40):
        world.drain(1)
        box[:] = [message for message in box if not isinstance(message, Abort)]
    assert world.replicas["g0"].state.name == "ABORTING"
    assert world.replicas["g0"].attempt.silent(ending=True) == ["g0.r1"]
    assert world.calm() < 20


def test_an_answer_to_an_earlier_attempt_counts_for_nothing():
    world = World()
    world.calm()
    world.generators["g0"].shadows[1].fail["build"] = RuntimeError("no room")
    world.publish()
    early = []
    for _ in range(60):
        early += [(p, m) for p, m in world.net.to_publisher if p == "g0.r0" and isinstance(m, Ready)]
        world.drain(1)
    replica = world.replicas["g0"]
    assert early
    assert replica.retry.failures == 1
    world.now += 5
    world.protocol.expire()
    world.run_job()
    assert replica.state.name == "SENDING"
    world.protocol.hear(*early[0])
    assert replica.attempt.ready == {}


def test_a_check_that_takes_longer_than_a_transfer_may_is_named_and_the_version_is_sent_again():
    world = World()
    world.calm()
    world.publish()
    checks, world.checks = world.checks, []
    world.drain(200)
    assert states(world) == dict.fromkeys(RANKS, ("SENDING", 0))
    world.now += CONFIG.transfer_timeout_s
    world.protocol.expire()
    world.checks = checks
    failures = [event for event in world.session.events.since(0) if isinstance(event, Failure) and event.version == 1]
    said = f"the check for NaN and Inf took more than {CONFIG.transfer_timeout_s:g} s"
    assert {(event.phase, event.reason) for event in failures} == {("finite", said)}
    assert world.calm() < 20
    assert states(world) == dict.fromkeys(RANKS, ("IDLE", 1))


def test_all_generators_that_hold_a_version_commit_it_when_its_check_ends():
    world = World()
    world.calm()
    world.checks_late = True
    world.publish()
    world.drain(400)  # no time passes
    assert states(world) == dict.fromkeys(RANKS, ("IDLE", 1))


@pytest.mark.parametrize("seed", range(10))
def test_a_version_that_is_not_finite_is_committed_by_none_whenever_its_check_ends(seed):
    chance = random.Random(seed)
    world = World()
    world.calm()
    world.publish()
    (offer,) = world.checks
    world.checks = []
    for _ in range(chance.randrange(80)):
        move = chance.choice(
            ["up"] * 4 + ["down"] * 4 + ["job"] * 3 + ["time", "heal", "cut off", "rank fails", "restart"]
        )
        world.step(move, chance.randrange(6))
    offer.unsound = NotFinite("version 1 is rejected")
    assert world.protocol.expire() is offer.unsound
    for _ in range(20):
        world.heal()
        world.drain(200)
        world.now += 1.5
        world.protocol.expire()
    assert world.protocol.settled()
    assert {event.version for event in world.session.events.since(0) if isinstance(event, Swap)} == {0}
    assert {replica.committed for replica in world.replicas.values()} <= {0, None}
    failures = [event for event in world.session.events.since(0) if isinstance(event, Failure)]
    rejected = [event.generator for event in failures if event.phase == "finite"]
    assert len(rejected) == len(set(rejected)), "it is not sent again"


# --- a version that is pinned -----------------------------------------------------------------------------------------


def pinned_world(timeout_s=30.0, **options):
    """A world in which version 1 is live everywhere, and g0 keeps it."""
    world = World()
    world.calm()
    world.publish()
    world.drain(200)
    world.keep(0, timeout_s, **options)
    assert (world.pin.generator, world.pin.version) == ("g0", 1)
    return world


def states(world):
    return {name: (replica.state.name, replica.committed) for name, replica in world.replicas.items()}


def of_g0(world, kind):
    return [event.version for event in world.session.events.since(0) if event.generator == "g0" and type(event) is kind]


def test_a_pinned_generator_is_sent_the_next_version_and_commits_it_afterwards():
    world = pinned_world()
    world.publish()
    world.drain(200)
    assert states(world) == {"g0": ("READY", 1), "g1": ("IDLE", 2)}
    assert world.protocol.settled()
    assert [receiver.state for receiver in world.generators["g0"].receivers] == [ReceiverState.READY] * 2
    world.now += 7
    world.unpin()
    world.drain(200)
    assert states(world) == {"g0": ("IDLE", 2), "g1": ("IDLE", 2)}
    (swap,) = [e for e in world.session.events.since(0) if (e.generator, e.version) == ("g0", 2)]
    assert (swap.pinned_s, swap.ready_s, swap.commit_s) == (7.0, 0.0, 0.0)


def test_a_version_that_waits_for_the_end_of_a_pin_does_not_keep_the_send_buffer_and_is_superseded():
    world = pinned_world()
    for newest in (2, 3, 4):
        assert world.protocol.withdraw(supersede=False)  # at once: what waits was delivered
        world.release(newest)
        world.drain(200)
        assert states(world) == {"g0": ("READY", 1), "g1": ("IDLE", newest)}
    world.unpin()
    world.drain(200)
    assert states(world) == {"g0": ("IDLE", 4), "g1": ("IDLE", 4)}
    assert of_g0(world, Superseded) == [2, 3]
    assert of_g0(world, Swap) == [0, 1, 4]


def test_a_pin_that_ends_while_the_newest_version_is_sent_ends_with_that_one():
    world = pinned_world()
    world.publish()
    world.drain(200)
    world.publish()  # takes the place of the one that waits
    assert world.replicas["g0"].state.name == "ABORTING"
    world.unpin()
    world.drain(200)
    assert states(world) == {"g0": ("IDLE", 3), "g1": ("IDLE", 3)}
    assert of_g0(world, Swap) == [0, 1, 3]


def test_a_pin_that_is_asked_for_before_its_version_is_live_goes_to_the_first_generator_that_gets_it():
    world = World()
    world.calm()
    world.publish()
    pin = world.keep(0, 30)
    assert pin.wanted
    for _ in range(100):
        world.drain(1)
        if not pin.wanted:
            break
    assert world.replicas[pin.generator].committed == 1
    assert pin.route.incarnation == world.generators[pin.generator].incarnation


def test_a_generator_that_was_sent_the_next_commit_can_not_keep_the_version_before():
    world = World()
    world.calm()
    world.publish()
    for _ in range(100):
        world.drain(1)
        if world.replicas["g0"].state.name == "COMMITTING":
            break
    assert world.replicas["g0"].committed == 0
    assert world.replicas["g1"].committed == 0
    pin = world.keep(1, 30)
    assert pin.generator == "g1"


def test_a_pin_that_no_generator_can_have_any_more_ends_with_its_reason():
    world = World()
    world.calm()
    world.publish()
    world.drain(200)
    pin = world.keep(1, 30)  # version 0, which both have left
    world.protocol.expire()
    assert pin.ended == "no generator has got version 0 before version 1"
    pin = world.keep(-5, 3)
    world.now += 2
    world.protocol.expire()
    assert pin.wanted
    world.now += 1
    world.protocol.expire()
    assert pin.ended == "no generator has got version 6 in time"


def test_a_pin_is_bounded_and_the_version_that_waits_is_then_committed():
    world = pinned_world(timeout_s=5.0)
    world.publish()
    world.drain(200)
    world.now += 4.9
    world.protocol.expire()
    assert world.replicas["g0"].state.name == "READY"
    world.now += 0.1
    world.protocol.expire()
    world.drain(200)
    assert world.pin.ended == "it was not released in time"
    assert states(world) == {"g0": ("IDLE", 2), "g1": ("IDLE", 2)}
    world.protocol.unpin(world.pin, "too late")  # changes nothing
    assert world.pin.ended == "it was not released in time"


def test_a_pin_ends_with_the_death_of_its_generator_and_not_with_that_of_another():
    world = pinned_world()
    world.publish()
    world.drain(200)
    world.restart("g1")
    world.drain(400)
    assert world.replicas["g0"].pin is world.pin
    world.step("kill", 0)
    assert world.pin.ended == "g0: g0.r0 was lost"
    assert of_g0(world, Failure) == [2]
    world.restart("g0")
    world.drain(400)
    assert states(world) == {"g0": ("IDLE", 2), "g1": ("IDLE", 2)}
    assert world.keep(0, 5).generator == "g0"  # another one may be asked for


def test_a_transport_that_breaks_while_a_version_waits_is_replaced_after_the_commit():
    world = pinned_world()
    world.publish()
    world.drain(200)
    world.step("transport breaks", 0)
    world.protocol.expire()
    assert world.replicas["g0"].state.name == "READY"
    world.unpin()
    world.drain(200)
    assert states(world)["g0"] == ("IDLE", 2)
    world.publish()
    world.drain(200)
    assert states(world) == {"g0": ("IDLE", 3), "g1": ("IDLE", 3)}


@pytest.mark.parametrize("routed", [True, False])
def test_the_pin_says_whether_its_generator_gets_requests_however_far_it_is_behind(routed):
    world = pinned_world(routed=routed)
    for _ in range(5):
        world.publish()
        world.drain(200)
    served = routes(world.protocol.version, world.replicas.values(), 2)
    assert set(served.generators) == ({"g0", "g1"} if routed else {"g1"})
    world.unpin()
    world.drain(200)
    served = routes(world.protocol.version, world.replicas.values(), 2)
    assert {name: route.version for name, route in served.generators.items()} == {"g0": 6, "g1": 6}


def test_one_version_is_pinned_at_a_time():
    world = pinned_world()
    with pytest.raises(ValueError, match="version 1 is pinned already"):
        world.protocol.pin(1, 5, routed=True)


def test_a_publisher_that_closes_lets_go_of_a_version_that_waits():
    world = pinned_world()
    world.publish()
    world.drain(200)
    world.replicas["g0"].close()
    assert any(isinstance(message, Abort) for message in world.net.to_peer["g0.r0"])


# --- ranks that report their swaps ------------------------------------------------------------------------------------


def swapping_world():
    """A world in which version 1 is committed next, by the word of ranks alone: what engines answer is held up."""
    world = World()
    world.calm()
    world.engines_late = True
    world.at_once = False
    world.publish()
    return world


def until_swapped(world, after=0):
    """Until the ranks of g0 have swapped, and not been heard, in an attempt with a number above `after`."""
    replica = world.replicas["g0"]
    for _ in range(100):
        world.drain(1)
        sent = replica.state.name == "COMMITTING" and replica.attempt.number > after
        if sent and not world.net.to_peer["g0.engine"]:
            return
    raise AssertionError("its engine was sent no Commit")


def take_reports(world):
    """Takes those of g0's ranks off their way."""
    found = [(p, m) for p, m in world.net.to_publisher if type(m) is RankSwapped and p.startswith("g0")]
    world.net.to_publisher = [each for each in world.net.to_publisher if each not in found]
    assert [(peer, message.version) for peer, message in found] == [("g0.r0", 1), ("g0.r1", 1)]
    return found


def test_a_version_is_committed_by_its_ranks_and_the_next_one_sent_before_the_engine_has_answered():
    world = swapping_world()
    world.drain(200)
    assert states(world) == {"g0": ("IDLE", 1), "g1": ("IDLE", 1)}
    assert (of_g0(world, Swap), world.protocol.settled()) == ([0], False)  # the figures are the engine's
    world.publish()
    until_swapped(world)
    (late,) = [each for each in world.net.to_publisher if each[0] == "g0.engine" and each[1].version == 1]
    world.net.to_publisher.remove(late)
    world._hear(*late)
    assert states(world)["g0"] == ("COMMITTING", 1)
    assert [(e.version, e.running) for e in world.session.events.since(0) if e.generator == "g0"] == [(0, 1), (1, 1)]
    world.calm()
    assert of_g0(world, Swap) == [0, 1, 2]
    assert world.protocol.settled()
    assert world.session.outbox.ignored.total() == 0


def test_the_word_of_one_rank_however_often_is_not_that_of_all():
    world = swapping_world()
    until_swapped(world)
    first, second = take_reports(world)
    for _ in range(3):
        world._hear(*first)
    assert states(world)["g0"] == ("COMMITTING", 0)
    world._hear(*second)
    assert states(world)["g0"] == ("IDLE", 1)


def test_ranks_that_are_heard_after_their_engine_say_nothing_new():
    world = swapping_world()
    world.engines_late = False
    until_swapped(world)
    late = take_reports(world)
    world.drain(200)
    assert states(world)["g0"] == ("IDLE", 1)
    for report in [*late, *late]:
        world._hear(*report)
    assert (states(world)["g0"], of_g0(world, Swap)) == (("IDLE", 1), [0, 1])
    assert world.session.outbox.ignored.total() == 0


def test_a_rank_that_has_swapped_does_not_speak_for_one_that_is_poisoned():
    world = swapping_world()
    world.generators["g0"].shadows[1].fail["swap"] = RuntimeError("half")
    world.drain(200)
    assert states(world)["g0"] == ("POISONED", None)
    assert (of_g0(world, Swap), of_g0(world, Failure)) == ([0], [1])


def test_reports_of_an_earlier_start_of_the_generator_count_for_nothing():
    world = swapping_world()
    until_swapped(world)
    earlier = take_reports(world)
    number = world.replicas["g0"].attempt.number
    world.restart("g0")
    until_swapped(world, after=number)  # to the same version, which is the first one of the new ranks: they are silent
    for report in earlier:
        world._hear(*report)
    assert states(world)["g0"] == ("COMMITTING", None)
    assert world.session.outbox.ignored["RankSwapped"] == 2


def test_an_answer_of_an_earlier_start_of_the_engine_counts_for_nothing():
    world = swapping_world()
    until_swapped(world)
    take_reports(world)
    (earlier,) = [each for each in world.net.to_publisher if each[0] == "g0.engine"]
    world.net.to_publisher.remove(earlier)
    number = world.replicas["g0"].attempt.number
    world.restart("g0")
    until_swapped(world, after=number)
    world._hear(*earlier)
    assert states(world)["g0"] == ("COMMITTING", None)


def test_reports_to_another_publisher_count_for_nothing_though_attempt_and_version_have_the_same_numbers():
    world = swapping_world()
    until_swapped(world)
    earlier = take_reports(world)
    number = world.replicas["g0"].attempt.number
    world.begin_publisher(0)
    for name in RANKS:
        world.restart(name)
    world.calm()
    world.engines_late = True
    world.publish()
    until_swapped(world)
    take_reports(world)
    assert world.replicas["g0"].attempt.number == number
    for report in earlier:
        world._hear(*report)
    assert states(world)["g0"] == ("COMMITTING", 0)


def test_the_first_version_and_a_number_that_is_stamped_already_are_for_the_engine_to_report():
    """Before it has, a generator answers 503, and its prefix cache may have KV of the other publisher's weights."""
    world = World()
    world.calm()
    assert world.net.reports == []
    world.begin_publisher(0)
    world.calm()
    assert world.net.reports == []
    world.publish()
    world.drain(200)
    assert [peer for peer, _ in world.net.reports] == ["g0.r0", "g0.r1", "g1.r0"]


@pytest.mark.parametrize("ending", ["time", "loss", "the next commit", "the publisher's end"])
def test_a_version_whose_figures_never_come_is_recorded_without_them(ending):
    world = swapping_world()
    world.drain(200)
    world.net.to_publisher.clear()
    assert not world.protocol.settled()
    match ending:
        case "time":
            world.now += CONFIG.commit_timeout_s
            world.protocol.expire()
        case "loss":
            for name in RANKS:
                world.lose(f"{name}.engine")
        case "the next commit":
            world.engines_late = False
            world.publish()
            world.drain(200)
        case "the publisher's end":
            for replica in world.replicas.values():
                replica.close()
    found = [each for each in world.session.events.since(0) if each.version == 1]
    assert [(type(each), each.generator, each.running, each.gap_s) for each in found] == [
        (Swap, "g0", None, 0.001),
        (Swap, "g1", None, 0.001),
    ]
    assert world.protocol.settled()


def test_a_version_that_its_ranks_have_reported_is_recorded_before_its_engine_fails():
    world = swapping_world()
    world.drain(200)
    world.net.to_publisher.clear()
    world._hear("g0.engine", Failed(version=1, phase="commit", reason="no answer", poisoned=True))
    found = [type(each) for each in world.session.events.since(0) if each.version == 1 and each.generator == "g0"]
    assert found == [Swap, Failure]


def test_a_version_that_only_its_ranks_have_reported_can_be_pinned():
    world = swapping_world()
    world.drain(200)
    pin = world.keep(0, 30)
    assert (pin.generator, pin.version) == ("g0", 1)
    world.publish()
    world.drain(200)
    assert states(world)["g0"] == ("READY", 1)
    world.engines_late = False
    world.drain(200)
    assert (states(world)["g0"], of_g0(world, Swap)) == (("READY", 1), [0, 1])
    world.unpin()
    world.drain(200)
    assert states(world)["g0"] == ("IDLE", 2)
