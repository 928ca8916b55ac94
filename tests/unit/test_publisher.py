"""Publisher and receivers over the real bus and real gloo; generators are fakes, faults are made on purpose.

Each test asserts what was committed, what was touched and in which order. Bounds only guard against hanging.
"""

import dataclasses
import multiprocessing
import os
import re
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
from fake_generator import BUS, FakeGenerator, eventually
from torch import nn

from inflight.bus import Link, Listener
from inflight.config import PublishConfig, load
from inflight.launcher import launch
from inflight.messages import (
    Abort,
    Aborted,
    Commit,
    Committed,
    EngineHello,
    Finish,
    Prepare,
    RankHello,
    Ready,
    Refused,
    Welcome,
)
from inflight.types import Routes
from inflight.weights.pack import unpack
from inflight.weights.publish import replica
from inflight.weights.publish.attempt import Attempt
from inflight.weights.publish.channel import Channel
from inflight.weights.publish.events import Failure, Superseded, Swap
from inflight.weights.publish.finite import NotFinite, require_finite
from inflight.weights.publish.loop import PublisherLoop
from inflight.weights.publish.membership import Membership
from inflight.weights.publish.offer import Offer
from inflight.weights.publish.publisher import Publisher, PublishError
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.publish.routes import RoutesFile, routes
from inflight.weights.publish.standing import Standing
from inflight.weights.publish.states import ReplicaState
from inflight.weights.receive.rank_state import ReceiverState
from inflight.weights.receive.shadow import ManifestMismatch
from inflight.weights.source import SourceError, WeightSource
from inflight.weights.transport import make_receiver

QUICK = PublishConfig(
    transport="auto", bucket_bytes=4096, join_timeout_s=20, transfer_timeout_s=20, commit_timeout_s=20, retry_after_s=60
)
IMPATIENT = PublishConfig(bucket_bytes=4096, transfer_timeout_s=2, commit_timeout_s=2, retry_after_s=60)
EAGER = PublishConfig(bucket_bytes=4096, transfer_timeout_s=2, retry_after_s=0.1, supersede_after_s=0.5)
DONE = ["begin", "build", "swap"]


class Run:
    """A model, its publisher and fake generators on one bus."""

    def __init__(self, endpoint, ranks, config):
        self.endpoint = endpoint
        self.model = nn.Sequential(nn.Embedding(200, 16), nn.Linear(16, 200, bias=False), nn.LayerNorm(200))
        self.model[1].weight = self.model[0].weight
        self._fill(0)
        self.listener = Listener(endpoint, BUS)
        source = WeightSource(self.model, "bfloat16")
        self.publisher = Publisher(source, self.listener, config, version=0, ranks=ranks)
        self.generators = {}

    def join(self, *names, **options):
        for name in names:
            world_size = self.replica(name).members.world_size
            self.generators[name] = FakeGenerator(self.endpoint, name, world_size, **options).start()
        return [self.generators[name] for name in names]

    def replica(self, name="g0"):
        return self.publisher._loop.protocol.membership.replicas[name]

    def joined(self, *names, **options):
        """Joins and takes the version that the trainer starts with; what follows is noted from there on."""
        generators = self.join(*names, **options)
        self.publisher.wait_joined(20)
        for generator in generators:
            generator.heard.clear()
            for shadow in generator.shadows:
                shadow.events.clear()
        return generators

    def publish(self, version):
        """Gives every parameter the version's value, so that bytes tell versions apart, and publishes."""
        self._fill(version)
        return self.publisher.publish(version)

    def _fill(self, version):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(version + 0.5)

    @property
    def id(self):
        """By which this publisher's versions are distinguished from another's."""
        return self.publisher._loop.session.publisher

    @property
    def events(self):
        """The outcomes of the versions after the one that the trainer started with."""
        return [event for event in self.publisher.events if event.version > 0]

    @property
    def ignored(self):
        """Kinds of answers that fitted nothing. On a slow machine members are asked twice for what they hold."""
        return set(self.publisher._loop.session.outbox.ignored) - {"RankHello", "EngineHello"}

    def routed(self):
        """Generators that requests may be sent to, as the file says."""
        loop = self.publisher._loop
        with loop.changed:
            max_behind = loop.session.config.max_behind
            return set(routes(self.publisher.version, loop.protocol.replicas, max_behind).generators)

    def failures(self):
        return [event for event in self.publisher.events if isinstance(event, Failure)]

    def state(self, name="g0"):
        return self.publisher.states[name][0]

    def close(self):
        for generator in self.generators.values():
            generator.close()
        self.publisher.close()
        self.listener.close()


@pytest.fixture
def run(tmp_path):
    @contextmanager
    def made(config=QUICK, **ranks):
        run = Run(f"ipc://{tmp_path}/w", ranks or {"g0": 1}, config)
        try:
            yield run
        finally:
            run.close()

    return made


@pytest.fixture
def patient(monkeypatch):
    """No member is sent Enquire while its hello is on its way, however long the machine takes to bring it."""
    monkeypatch.setattr(Membership, "enquire", lambda self, replica: None)


def values(shadow):
    """The version that each live tensor of a shadow holds; one number when all agree, as they must."""
    assert set(shadow.live) in (set(), {"0.weight", "2.weight", "2.bias"})
    return {float(tensor.unique().item()) - 0.5 for tensor in shadow.live.values()}


def test_the_buffer_holds_what_the_generators_start_with(run):
    """Packed once before anything is trained: what the first packing costs, no step waits for."""
    with run() as r:
        held = unpack(r.publisher.manifest, r.publisher._buffer)
        assert {name: each.tolist() for name, each in held.items()} == {
            name: each.bfloat16().tolist() for name, each in r.model.named_parameters()
        }


def test_versions_reach_every_rank_of_every_generator_whole_and_in_order(run, patient):
    with run(g0=2, g1=1) as r:
        generators = r.joined("g0", "g1")
        assert r.publisher.committed == {"g0": 0, "g1": 0}
        for version in (1, 2, 3):
            report = r.publish(version)
            assert report.version == version
            assert min(report.wait_s, report.pack_s) >= 0
            r.publisher.flush(20)
            assert r.publisher.committed == {"g0": version, "g1": version}
            for generator in generators:
                assert [values(shadow) for shadow in generator.shadows] == [{version}] * generator.world_size
        for generator in generators:
            assert [shadow.events for shadow in generator.shadows] == [DONE * 3] * generator.world_size
            assert generator.commits == [1, 2, 3]
        swaps = r.events
        assert [(s.generator, s.version) for s in sorted(swaps, key=lambda s: (s.generator, s.version))] == [
            (name, version) for name in ("g0", "g1") for version in (1, 2, 3)
        ]
        assert all(isinstance(s, Swap) and s.gap_s == 0.001 and s.running == 3 and s.ready_s > 0 for s in swaps)
        assert (r.publisher.ignored, r.publisher.version) == (0, 3)
        stats = r.publisher.stats()
        assert (stats["swaps"], stats["swaps_with_running"], stats["failures"]) == (8, 8, 0)


@pytest.mark.parametrize("held", [None, 0])
def test_the_version_that_the_trainer_starts_with_is_sent_like_any_other(run, held):
    """Also to one that holds that number of another publisher: the weights behind it may be others."""
    with run(g0=2, g1=1) as r:
        (g0,) = r.join("g0", version=held, publisher="f" * 16)
        held_up = g0.shadows[0].hold["build"] = threading.Event()
        eventually(lambda: "build" in g0.shadows[0].events, "the transfer")
        assert (r.publisher.committed, r.routed()) == ({}, set())
        held_up.set()
        r.publisher.wait_joined(20, at_least=1)
        assert [values(shadow) for shadow in g0.shadows] == [{0}, {0}]
        assert (r.publisher.committed, g0.commits, g0.version) == ({"g0": 0}, [0], 0)
        eventually(lambda: r.routed() == {"g0"}, "its route")
        assert [(type(e), e.generator, e.version) for e in r.publisher.events] == [(Swap, "g0", 0)]


@pytest.mark.parametrize("start", [3, 5])
def test_a_trainer_that_comes_back_is_heard_and_sends_what_it_has(run, tmp_path, start):
    """At the version that is held, and beyond it; the weights behind an equal number are its own."""
    with run(g0=1) as r:
        (g0,) = r.joined("g0")
        r.publish(3)
        r.publisher.flush(20)
        r.publisher.close()
        r.listener.close()
        r._fill(7)
        r.listener = Listener(r.endpoint, BUS)
        r.publisher = Publisher(WeightSource(r.model, "bfloat16"), r.listener, QUICK, version=start, ranks={"g0": 1})
        r.publisher.wait_joined(20)
        assert (r.publisher.committed, values(g0.shadows[0])) == ({"g0": start}, {7})
        assert g0.commits == [3, start]
        r.publish(start + 1)
        assert r.publisher.flush(20) == {}
        assert values(g0.shadows[0]) == {start + 1}


def test_a_trainer_below_what_a_generator_holds_says_so_at_once_and_so_does_the_generator(run):
    with run(g0=1, g1=1) as r:
        r.join("g1")
        (g0,) = r.join("g0", version=9, publisher="f" * 16)
        with pytest.raises(PublishError) as told:
            r.publisher.wait_joined(300)
        says = r"what is published can't be taken by g0: g0\.(r0|engine): it holds version 9, the trainer is at 0: "
        assert re.fullmatch(says + "restart the generator, or begin at that version", str(told.value))
        eventually(lambda: any(isinstance(message, Refused) for message in g0.heard), "the engine's end")
        eventually(lambda: g0.receivers[0].state.name == "FAILED", "the rank's end")
        assert g0.receivers[0].version == 9
        r.publisher.wait_joined(20, at_least=1)
        g0.close()
        (again,) = r.join("g0")  # restarted, it holds nothing
        eventually(lambda: not r.publisher.incompatible, "its hello")
        r.publisher.wait_joined(20)
        assert (r.publisher.incompatible, again.commits) == ({}, [0])


def test_a_generator_that_can_never_take_the_parameters_is_reported_to_the_caller(run):
    reason = "g1: g1.r0: ManifestMismatch: model.norm.weight [7] does not fit the engine"
    with run(g0=1, g1=1) as r:
        g0, g1 = r.join("g0", "g1")
        g1.shadows[0].fail["build"] = ManifestMismatch("model.norm.weight [7] does not fit the engine")
        with pytest.raises(PublishError, match=rf"^what is published can't be taken by {re.escape(reason)}$"):
            r.publisher.wait_joined(300)
        r.publisher.wait_joined(20, at_least=1)
        assert r.publish(1).incompatible == {"g1": reason.removeprefix("g1: ")}
        assert r.publisher.flush(20) == {"g1": f"INCOMPATIBLE: {reason.removeprefix('g1: ')}"}
        assert r.publisher.committed == {"g0": 1}
        assert [(f.version, f.phase) for f in r.failures()] == [(0, "fit"), (1, "absent")]
        assert (g1.shadows[0].events.count("build"), g1.heard) == (1, []), "neither a second build nor an end"
        g0.shadows[0].fail["begin"] = ManifestMismatch("so here")
        r.publish(2)
        with pytest.raises(PublishError, match=r"^what is published can't be taken by g0: .*so here; g1: "):
            r.publisher.flush(20)
        with pytest.raises(PublishError, match=r"^what is published can't be taken by g0: .*so here; g1: "):
            r.publish(3)


def test_a_version_that_no_generator_took_is_returned_with_the_reason(run):
    with run() as r:
        (g0,) = r.joined("g0")
        g0.shadows[0].fail["build"] = RuntimeError("no room")
        r.publish(1)
        assert r.publisher.flush(20) == {"g0": "IDLE: version 1 failed (build): g0.r0: RuntimeError: no room"}
        with pytest.raises(PublishError, match=r"\(g0 IDLE: version 1 failed \(build\): g0\.r0: .*no room\)$"):
            r.publisher.wait_joined(0.2)
        g0.close()
        eventually(lambda: r.state() is ReplicaState.ABSENT)
        r.publish(2)
        assert r.publisher.flush(20) == {"g0": f"ABSENT: {r.publisher.states['g0'][1]}"}


def test_a_version_is_committed_when_all_ranks_say_so_and_recorded_with_what_the_engine_says(run):
    with run(g0=2) as r:
        (g0,) = r.joined("g0")
        g0.mute.set()
        g0.shadows[1].hold["swap"] = threading.Event()
        r.publish(1)
        eventually(
            lambda: r.state() is ReplicaState.COMMITTING and r.replica().attempt.swapped, "the first rank's report"
        )
        assert r.publisher.committed == {"g0": 0}
        g0.shadows[1].hold["swap"].set()
        eventually(lambda: r.publisher.committed == {"g0": 1}, "the second rank's")
        assert (r.state(), r.events) == (ReplicaState.IDLE, [])
        g0.shadows[0].hold["build"] = threading.Event()
        r.publish(2)
        eventually(lambda: "build" in g0.shadows[0].events[3:], "the next transfer")
        g0.answer()
        eventually(lambda: r.events, "the record of the version before")
        g0.shadows[0].hold["build"].set()
        r.publisher.flush(20)
        assert [(swap.version, swap.running) for swap in r.events] == [(1, 3), (2, 3)]
        assert r.ignored == set()


def test_the_first_version_is_committed_only_when_the_engine_says_so(run):
    """Until then the generator answers 503."""
    with run() as r:
        (g0,) = r.join("g0")
        g0.mute.set()
        eventually(lambda: g0.unanswered, "the swap")
        assert r.publisher.committed == {}
        assert r.state() is ReplicaState.COMMITTING
        g0.answer()
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 0}


def test_a_publish_packs_only_after_the_version_before_has_its_outcome(run):
    with run() as r:
        (g0,) = r.joined("g0")
        shadow = g0.shadows[0]
        shadow.hold["begin"] = threading.Event()
        r.publish(1)
        second = threading.Thread(target=r.publish, args=(2,))
        second.start()
        eventually(lambda: "begin" in shadow.events, "prepare")
        second.join(0.2)
        assert second.is_alive()
        assert r.publisher.version == 1
        shadow.hold["begin"].set()
        second.join(20)
        r.publisher.flush(20)
        assert [event.version for event in r.events] == [1, 2]
        assert values(shadow) == {2}
        assert r.failures() == []  # in particular no checksum: nothing was packed over version 1


def test_a_rank_that_can_not_build_keeps_its_whole_generator_on_the_old_version(run, patient):
    with run(g0=2, g1=1) as r:
        g0, _ = r.joined("g0", "g1")
        r.publish(1)
        r.publisher.flush(20)
        g0.shadows[1].fail["build"] = RuntimeError("o_proj does not fit")
        r.publish(2)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 1, "g1": 2}
        (failure,) = r.failures()
        assert (failure.generator, failure.version, failure.phase) == ("g0", 2, "build")
        assert failure.reason == "g0.r1: RuntimeError: o_proj does not fit"
        eventually(lambda: g0.shadows[0].events[-1] == "discard", "the other rank's discarding")
        assert [values(shadow) for shadow in g0.shadows] == [{1}, {1}]
        assert g0.commits == [1]
        g0.shadows[1].fail.clear()
        r.publish(3)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 3, "g1": 3}
        assert r.ignored == set()


def test_a_rank_that_can_not_begin_frees_the_others_and_gets_a_new_transport(run):
    with run(g0=2) as r:
        (g0,) = r.joined("g0")
        g0.shadows[0].fail["begin"] = MemoryError("no room")
        r.publish(1)
        r.publisher.flush(20)
        assert [(f.phase, f.reason) for f in r.failures()] == [("prepare", "g0.r0: MemoryError: no room")]
        assert r.publisher.committed == {"g0": 0}
        g0.shadows[0].fail.clear()
        for version in (2, 3):
            r.publish(version)
            r.publisher.flush(20)
            assert r.publisher.committed == {"g0": version}


def test_a_transport_that_is_late_to_close_is_not_laid_on_ranks_that_were_not_asked_yet(run, monkeypatch):
    """They get an Abort when it is closed; NCCL may take its time over that."""
    entered, enter, late_s = [], Standing.enter, [0.0]
    monkeypatch.setattr(
        Standing, "enter", lambda self, state, *a, **k: (entered.append(state), enter(self, state, *a, **k))
    )
    with run(g0=2) as r:
        (g0,) = r.joined("g0")
        r.publisher._loop.session.clock = lambda: time.monotonic() + late_s[0]
        channel = r.replica().channel
        close = channel.close

        def closed_late():
            late_s[0] += 2 * replica.ABORT_S
            close()

        channel.close = closed_late
        g0.shadows[0].fail["begin"] = MemoryError("no room")
        r.publish(1)
        r.publisher.flush(20)
        assert late_s[0] > 0
        g0.shadows[0].fail.clear()
        r.publish(2)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 2}
        assert ReplicaState.ABORTING in entered
        assert ReplicaState.STALLED not in entered
        assert [f.phase for f in r.failures()] == ["prepare"]


def test_a_rank_that_does_not_answer_is_named_left_alone_and_taken_back_when_it_does(run):
    with run(IMPATIENT, g0=2, g1=1) as r:
        g0, g1 = r.joined("g0", "g1")
        g0.shadows[1].hold["build"] = threading.Event()
        r.publish(1)
        r.publisher.flush(20)
        assert [(f.generator, f.reason) for f in r.failures()] == [("g0", "no answer from g0.r1 within 2 s")]
        assert r.state() is ReplicaState.STALLED
        r.publish(2)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 0, "g1": 2}
        assert r.failures()[1] == Failure("g0", 2, "absent", "STALLED, no answer to Abort from g0.r1")
        assert (r.publisher.behind, r.routed()) == ({"g0": 2, "g1": 0}, {"g1"})
        g0.shadows[1].hold["build"].set()
        eventually(lambda: r.publisher.committed == {"g0": 2, "g1": 2}, "catching up")
        r.publish(3)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 3, "g1": 3}
        assert [values(shadow) for shadow in (*g0.shadows, *g1.shadows)] == [{3}] * 3
        assert g0.commits == [2, 3]


def test_who_answers_in_time_is_not_late_because_the_publisher_was_busy(run):
    """Their answers wait; the deadline has passed when it comes to read them."""
    bound_s = 4.0
    with run(dataclasses.replace(IMPATIENT, transfer_timeout_s=bound_s), g0=1, g1=1) as r:
        shadows = [generator.shadows[0] for generator in r.join("g0", "g1")]
        r.publisher.wait_joined(20)
        for shadow in shadows:
            shadow.hold["build"] = threading.Event()
        r.publish(1)
        eventually(lambda: all("build" in shadow.events for shadow in shadows), "the transfers")
        with r.publisher._loop.changed:
            for shadow in shadows:
                shadow.hold["build"].set()
            time.sleep(bound_s + 0.5)
        r.publisher.flush(20)
        assert r.failures() == []
        assert r.publisher.committed == {"g0": 1, "g1": 1}


def test_an_engine_that_does_not_answer_is_claimed_for_nothing_until_it_does(run):
    with run(IMPATIENT) as r:
        (g0,) = r.joined("g0")
        g0.shadows[0].hold["swap"] = threading.Event()
        r.publish(1)
        r.publisher.flush(20)
        assert r.state() is ReplicaState.UNSURE
        assert r.publisher.committed == {}
        assert [(f.phase, f.reason) for f in r.failures()] == [("commit", "g0.engine did not answer Commit within 2 s")]
        g0.shadows[0].hold["swap"].set()
        eventually(lambda: r.state() is ReplicaState.IDLE, "the late answer")
        assert r.publisher.committed == {"g0": 1}


class Corrupting:
    """A transport that flips one bit of what it received."""

    def __init__(self, welcome):
        self.inner, self.receives = make_receiver(welcome), 0

    def receive(self, buffer, buckets):
        self.inner.receive(buffer, buckets)
        self.receives += 1
        if self.receives == 3:
            buffer[5000] ^= 4

    def close(self):
        self.inner.close()


def test_a_corrupted_bucket_is_named_and_never_built(run):
    with run() as r:
        (g0,) = r.joined("g0", connect=Corrupting)
        for version in (1, 2, 3):
            r.publish(version)
            r.publisher.flush(20)
        (failure,) = r.failures()
        assert (failure.version, failure.phase) == (2, "verify")
        assert "buckets [1] of" in failure.reason
        assert g0.shadows[0].events == [*DONE, "begin", "discard", *DONE]
        assert r.publisher.committed == {"g0": 3}


def test_a_failed_swap_poisons_the_generator_and_nothing_is_claimed_for_it(run):
    with run(g0=2, g1=1) as r:
        g0, _ = r.joined("g0", "g1")
        g0.shadows[1].fail["swap"] = RuntimeError("half")
        r.publish(1)
        r.publisher.flush(20)
        eventually(lambda: r.state() is ReplicaState.POISONED)
        r.publish(2)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g1": 2}
        poisoned, absent = r.failures()
        # Rank and engine both report it; which is heard first is open.
        assert poisoned.reason in ("poisoned, g0.r1: RuntimeError: half", "poisoned, g0.engine: half")
        assert (absent.version, absent.phase) == (2, "absent")


def half_then_die(endpoint, name):
    """A generator of one rank that dies after the first bucket of version 1."""

    class Dying:
        def __init__(self, welcome):
            self.inner, self.received = make_receiver(welcome), 0

        def receive(self, buffer, buckets):
            if self.received:
                self.inner.receive(buffer, buckets[:1])
                os.kill(os.getpid(), 9)
            self.inner.receive(buffer, buckets)
            self.received += 1

        def close(self):
            pass

    FakeGenerator(endpoint, name, connect=Dying).start()
    threading.Event().wait(60)


def test_a_process_killed_in_a_transfer_delays_no_other(run):
    with run(g0=1, g1=1) as r:
        process = multiprocessing.get_context("fork").Process(target=half_then_die, args=(r.endpoint, "g1"))
        process.start()
        (g0,) = r.joined("g0")
        r.publish(1)
        process.join(20)
        assert process.exitcode == -9
        r.publisher.flush(20)
        assert r.publisher.committed["g0"] == 1
        assert r.publisher.committed.get("g1", 0) == 0
        (failure,) = r.failures()
        assert (failure.generator, failure.version, failure.phase) == ("g1", 1, "receive")
        eventually(lambda: r.state("g1") is ReplicaState.ABSENT, "noticing the loss")
        r.publish(2)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 2}
        assert values(g0.shadows[0]) == {2}
        assert "was lost" in r.failures()[-1].reason
        # A restarted one holds no version and is sent the newest at once.
        (g1,) = r.joined("g1")
        assert r.publisher.committed == {"g0": 2, "g1": 2}
        assert values(g1.shadows[0]) == {2}
        r.publish(3)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 3, "g1": 3}


@contextmanager
def peer(r, identity, hello):
    """A member played by hand."""
    with Link(r.endpoint, identity, BUS) as link:
        link.send(hello)
        yield link


def hear(link, kind):
    for _ in range(100):
        if isinstance(message := link.receive(0.2), kind):
            return message
    raise AssertionError(f"no {kind.__name__} came")


def rank_hello(**changes):
    return RankHello(**{"generator": "g0", "rank": 0, "world_size": 1, "version": 0} | changes)


OLD, NEW = "0" * 16, "1" * 16


def test_a_restarted_generator_is_admitted_only_when_all_its_members_are_back(run):
    with run(g0=1) as r:
        engine = EngineHello(generator="g0", world_size=1, version=0, publisher=r.id, url="http://x", incarnation=OLD)
        ranks = [rank_hello(publisher=r.id, incarnation=incarnation) for incarnation in (OLD, NEW)]
        with peer(r, "g0.r0", ranks[0]), peer(r, "g0.engine", engine) as told:
            r.publisher.wait_joined(20)
            with peer(r, "g0.r0", ranks[1]) as rank:  # before the loss is noticed
                eventually(lambda: r.state() is ReplicaState.ABSENT)
                assert r.publisher.states["g0"][1] == "no hello from g0.engine"
                assert (r.publisher.committed, r.routed()) == ({}, set())
                told.send(engine)  # of the one that was replaced
                assert "another process" in hear(told, Refused).reason
                told.send(msgspec.structs.replace(engine, incarnation=NEW))
                r.publisher.wait_joined(20)
                assert hear(rank, Welcome).transport_rank == 1


@pytest.mark.parametrize(
    ("identity", "hello", "reason"),
    [
        ("g7.r0", rank_hello(generator="g7"), "no generator of this run is named g7"),
        ("g0.r0", rank_hello(world_size=2), "world_size is 2, this run expects 1"),
        ("g0.r1", rank_hello(rank=1), "rank 1 of 1"),
        ("g1.r0", rank_hello(), r"g1\.r0 can't speak for g0\.r0"),
        ("g0.r0", rank_hello(version=1), "it holds version 1, the trainer is at 0"),
        ("g0.r0", EngineHello(generator="g0", world_size=1, version=0, url="http://x"), "can't speak for g0.engine"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_with_the_reason(run, identity, hello, reason):
    with run() as r, peer(r, identity, hello) as link:
        assert re.search(reason, hear(link, Refused).reason)
        assert r.publisher.ignored == 1
        mine = reason.startswith(("world", "rank", "it"))
        assert r.state() is (ReplicaState.INCOMPATIBLE if mine else ReplicaState.ABSENT)
        assert dict(r.publisher.incompatible) == ({"g0": r.publisher.states["g0"][1]} if mine else {})


def test_joining_names_the_missing_generators(run):
    with run(g0=2) as r, peer(r, "g0.r1", rank_hello(rank=1, world_size=2)):
        eventually(lambda: r.publisher.states["g0"][1] == "no hello from g0.r0, g0.engine", "its hello")
        with pytest.raises(PublishError, match=r"not all .* 0\.5 s \(g0 ABSENT: no hello from g0\.r0, g0\.engine\)"):
            r.publisher.wait_joined(0.5)


def test_members_that_hold_different_versions_are_not_admitted(run):
    with run(g0=1) as r:
        r.publisher._loop.protocol.version = 4
        engine = EngineHello(generator="g0", world_size=1, version=3, publisher=r.id, url="http://x")
        with peer(r, "g0.r0", rank_hello(version=4, publisher=r.id)), peer(r, "g0.engine", engine):
            eventually(lambda: "different versions" in r.publisher.states["g0"][1])
            assert (r.state(), r.publisher.committed) == (ReplicaState.ABSENT, {})


def test_answers_that_fit_nothing_are_counted_and_change_nothing(run):
    with run() as r:
        engine = EngineHello(generator="g0", world_size=1, version=0, publisher=r.id, url="http://x")
        with peer(r, "g0.r0", rank_hello(publisher=r.id)) as rank, peer(r, "g0.engine", engine) as told:
            r.publisher.wait_joined(20)
            ready = Ready(version=1, attempt=1, digest="0" * 64, receive_s=0, build_s=0)
            committed = Committed(version=1, gap_s=0, running=0)
            rank.send(ready)
            rank.send(committed)
            told.send(ready)
            told.send(committed)
            with peer(r, "g9.r0", ready):
                eventually(lambda: r.publisher.ignored == 5)
            assert (r.state(), r.publisher.committed) == (ReplicaState.IDLE, {"g0": 0})


def test_a_rank_that_claims_other_bytes_is_not_committed(run):
    with run() as r:
        engine = EngineHello(generator="g0", world_size=1, version=0, publisher=r.id, url="http://x")
        with peer(r, "g0.r0", rank_hello(publisher=r.id)) as rank, peer(r, "g0.engine", engine) as told:
            welcome = hear(rank, Welcome)
            r.publish(1)
            prepare = hear(rank, Prepare)
            receiver = make_receiver(welcome)
            receiver.receive(torch.empty(welcome.manifest.total_bytes, dtype=torch.uint8), welcome.manifest.buckets)
            answer = {"version": prepare.version, "attempt": prepare.attempt}
            rank.send(Ready(**answer, digest="0" * 64, receive_s=0, build_s=0))
            assert hear(rank, Abort).attempt == prepare.attempt
            rank.send(Aborted(**answer))
            r.publisher.flush(20)
            assert [(f.phase, f.reason) for f in r.failures()] == [
                ("verify", "g0.r0 is ready with other bytes than were sent")
            ]
            assert not isinstance(told.receive(0.1), Commit), "a busy machine may have it asked for what it holds"
            assert r.publisher.committed == {"g0": 0}


def test_a_version_must_be_newer_and_the_module_unchanged(run):
    with run() as r:
        (g0,) = r.joined("g0")
        r.publish(3)
        with pytest.raises(ValueError, match="version 3 is not newer than 3"):
            r.publish(3)
        tied, r.model[1].weight = r.model[1].weight, nn.Parameter(torch.zeros(200, 16))
        with pytest.raises(SourceError, match=r"1\.weight no longer shares"):
            r.publish(4)
        r.model[1].weight = tied
        r.publish(5)
        r.publisher.flush(20)
        assert g0.commits == [3, 5]


def test_closing_in_a_transfer_aborts_it_and_touches_nothing(run):
    with run() as r:
        (g0,) = r.joined("g0")
        g0.shadows[0].hold["begin"] = threading.Event()
        r.publish(1)
        eventually(lambda: "begin" in g0.shadows[0].events)
        r.publisher.close()
        g0.shadows[0].hold["begin"].set()
        eventually(lambda: g0.shadows[0].events == ["begin", "discard"])
        assert values(g0.shadows[0]) == {0}
        r.publisher.close()


def test_the_end_of_the_run_is_sent_to_the_engines(run):
    with run(g0=1, g1=1) as r:
        generators = r.joined("g0", "g1")
        r.publisher.finish("40 steps done")
        for generator in generators:
            eventually(lambda generator=generator: generator.heard == [Finish(reason="40 steps done")])


def test_a_broken_bus_ends_publishing_with_an_error(run):
    with run() as r:
        r.joined("g0")
        r.listener.receive = lambda _: 1 / 0
        eventually(lambda: r.publisher._loop.error is not None)
        with pytest.raises(PublishError, match="publishing has ended: ZeroDivisionError"):
            r.publish(1)
        with suppress(PublishError):
            r.publisher.flush(1)


def test_a_failed_generator_is_sent_the_newest_version_again(run):
    with run(EAGER, g0=1, g1=1) as r:
        g0, _ = r.joined("g0", "g1")
        g0.shadows[0].fail["build"] = RuntimeError("no room")
        r.publish(1)
        eventually(lambda: g0.shadows[0].events.count("build") >= 2, "trying again")
        eventually(lambda: r.publisher.committed == {"g0": 0, "g1": 1}, "the other one's commit")
        g0.shadows[0].fail.clear()
        eventually(lambda: r.publisher.committed == {"g0": 1, "g1": 1}, "catching up")
        assert values(g0.shadows[0]) == {1}


def test_a_trainer_does_not_wait_for_one_that_is_slow_when_another_has_the_version(run):
    with run(EAGER, g0=1, g1=1) as r:
        g0, g1 = r.joined("g0", "g1")
        g0.shadows[0].hold["build"] = threading.Event()
        for version in (1, 2, 3):
            assert r.publish(version).wait_s < EAGER.transfer_timeout_s
            eventually(lambda version=version: r.publisher.committed["g1"] == version)
        assert r.publisher.committed["g0"] == 0
        assert {(f.generator, f.phase) for f in r.failures()} <= {("g0", "absent")}
        passed_over = [event for event in r.events if isinstance(event, Superseded)]
        assert {event.generator for event in passed_over} == {"g0"}
        stats = r.publisher.stats()
        assert (stats["superseded"], stats["failures"]) == (len(passed_over), len(r.failures()))
        g0.shadows[0].hold["build"].set()
        eventually(lambda: r.publisher.committed == {"g0": 3, "g1": 3}, "catching up")
        assert g0.commits == [3]
        assert [values(shadow) for shadow in (*g0.shadows, *g1.shadows)] == [{3}] * 2


def test_what_was_summed_of_a_version_is_forgotten_when_the_next_one_is_packed(run):
    with run(EAGER) as r:
        r.joined("g0")
        sums = r.publisher._loop.session.channels.buffer_sums
        for version in (1, 2):
            sums._known[()] = b"of the version before"
            r.publish(version)
            r.publisher.flush(20)
            assert sums._known == {}


def test_a_version_that_no_generator_has_yet_is_not_superseded(run):
    with run(dataclasses.replace(EAGER, transfer_timeout_s=20)) as r:
        (g0,) = r.joined("g0")
        g0.shadows[0].hold["begin"] = threading.Event()
        r.publish(1)
        second = threading.Thread(target=r.publish, args=(2,))
        second.start()
        second.join(2 * EAGER.supersede_after_s)
        assert second.is_alive(), "it waits, and longer than for one that another generator has"
        g0.shadows[0].hold["begin"].set()
        second.join(20)
        r.publisher.flush(20)
        assert [(type(e), e.version) for e in r.events] == [(Swap, 1), (Swap, 2)]


def test_a_late_joiner_is_routed_to_only_once_it_has_the_newest_version(run, tmp_path):
    with run(g0=1, g1=1) as r:
        r.join("g0")
        r.publisher.wait_joined(20, at_least=1)
        for version in (1, 2):
            r.publish(version)
            r.publisher.flush(20)
        late = FakeGenerator(r.endpoint, "g1")
        late.shadows[0].hold["build"] = threading.Event()
        r.generators["g1"] = late.start()
        eventually(lambda: r.state("g1") is ReplicaState.SENDING, "its being sent the newest")
        assert r.publisher.committed == {"g0": 2}
        assert r.routed() == {"g0"}
        late.shadows[0].hold["build"].set()
        eventually(lambda: r.routed() == {"g0", "g1"})
        assert values(late.shadows[0]) == {2}
        assert late.commits == [2]


def test_one_that_falls_too_far_behind_is_not_routed_to_until_it_has_caught_up(run):
    with run(g0=1, g1=1) as r:
        g0, _ = r.joined("g0", "g1")
        g0.shadows[0].fail["build"] = RuntimeError("no room")
        for version in range(1, 7):
            r.publish(version)
            r.publisher.flush(20)
            assert r.routed() == ({"g0", "g1"} if version <= QUICK.max_behind else {"g1"})
        g0.shadows[0].fail.clear()
        r.publish(7)
        r.publisher.flush(20)
        assert (r.publisher.behind, r.routed()) == ({"g0": 0, "g1": 0}, {"g0", "g1"})


def test_one_that_was_cut_off_is_asked_and_joins_again(run):
    with run(EAGER, g0=2) as r:
        (g0,) = r.joined("g0")
        r.publish(1)
        r.publisher.flush(20)
        before = r.replica().channel
        with r.publisher._loop.changed:
            r.publisher._loop.protocol.lost("g0.r1")  # as the bus reports it
        eventually(lambda: r.state() is ReplicaState.IDLE and r.replica().channel is not before, "its return")
        r.publish(2)
        eventually(lambda: r.publisher.committed == {"g0": 2})
        assert [values(shadow) for shadow in g0.shadows] == [{2}] * 2


def test_an_engine_whose_ranks_are_gone_is_refused(run):
    with run(IMPATIENT, g0=2) as r:
        (g0,) = r.joined("g0")
        g0.receivers[1].close()
        eventually(lambda: any(isinstance(message, Refused) for message in g0.heard), "the end")
        assert "g0.r1 is not there since" in next(m.reason for m in g0.heard if isinstance(m, Refused))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_version_that_is_not_finite_goes_live_nowhere_and_names_the_parameter(run, value):
    with run(g0=1) as r:
        (g0,) = r.joined("g0")
        r.publish(1)
        r.publisher.flush(20)
        with torch.no_grad():
            r.model[2].weight[7] = value
        r.publisher.publish(2)
        expected = r"^version 2 is rejected: 2\.weight holds NaN or Inf \(1 of 200 values, in bfloat16\)$"
        with pytest.raises(PublishError, match=expected):
            r.publisher.flush(20)
        with pytest.raises(PublishError, match=expected):
            r.publish(3)
        assert r.publisher.committed == {"g0": 1}
        assert values(g0.shadows[0]) == {1}
        assert [(f.version, f.phase) for f in r.failures()] == [(2, "finite")]


@pytest.fixture
def check(monkeypatch):
    """Holds the checks for NaN and Inf after the one at the start: `began` by version, and what lets each go on."""
    began, go = [], defaultdict(threading.Event)

    def held(version, views):
        found = None
        try:
            require_finite(version, views)
        except NotFinite as error:
            found = error
        if version > 0:
            began.append(version)
            assert go[version].wait(30)
        if found is not None:
            raise found

    monkeypatch.setattr("inflight.weights.publish.offer.require_finite", held)
    return SimpleNamespace(began=began, go=go)


def test_a_version_that_all_ranks_hold_is_committed_after_its_check(run, check):
    with run(g0=2) as r:
        (g0,) = r.joined("g0")
        r.publish(1)
        eventually(lambda: len(r.replica().attempt.ready) == 2, "both ranks' Ready")
        eventually(lambda: check.began == [1])
        assert (r.state(), r.publisher.committed) == (ReplicaState.SENDING, {"g0": 0})
        assert not any(isinstance(message, Commit) for message in g0.heard)
        check.go[1].set()
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 1}
        assert [values(shadow) for shadow in g0.shadows] == [{1}, {1}]


def test_a_version_that_all_ranks_hold_and_that_is_not_finite_is_dropped_by_them(run, check):
    with run(g0=2) as r:
        (g0,) = r.joined("g0")
        r._fill(float("nan"))
        r.publisher.publish(1)
        eventually(lambda: len(r.replica().attempt.ready) == 2, "both ranks' Ready")
        check.go[1].set()
        with pytest.raises(PublishError, match=r"^version 1 is rejected: 0\.weight holds NaN or Inf"):
            r.publisher.flush(20)
        eventually(lambda: r.state() is ReplicaState.IDLE, "the ranks' answers to Abort")
        assert [receiver.state for receiver in g0.receivers] == [ReceiverState.IDLE] * 2
        assert (r.publisher.committed, g0.commits) == ({"g0": 0}, [])
        assert [values(shadow) for shadow in g0.shadows] == [{0}, {0}]


def test_a_check_that_ends_when_a_newer_version_is_in_the_buffer_ends_nothing(run, check):
    with run(g0=1) as r:
        r._fill(float("nan"))
        r.publisher.publish(1)  # there is no generator that reads the buffer
        eventually(lambda: check.began == [1])
        check.go[2].set()
        r.publish(2)
        check.go[1].set()
        r.joined("g0")
        assert r.publisher.committed == {"g0": 2}
        r.publisher.flush(20)


def test_a_check_and_checksums_wait_until_the_buffer_is_packed(run, monkeypatch):
    events = Mock()
    monkeypatch.setattr("inflight.weights.publish.offer.require_finite", events.check)
    monkeypatch.setattr("inflight.weights.publish.offer.checksums", events.sums)
    with run() as r:
        parts = (r.publisher._buffer, {}, events.fence, iter([64, 128]), events.known)
        offer = Offer(1, r.publisher.manifest, *parts, finite_check=True)
        for ask, done in ((offer.check, ["check"]), (offer.sums, ["known.forget", "sums"])):
            events.reset_mock()
            ask()
            ask()
            assert [name for name, *_ in events.mock_calls] == ["fence.wait_read", *done]


@pytest.mark.parametrize("checksum", ["none", "sum64"])
def test_a_sender_that_follows_the_packing_waits_for_its_first_part_unless_bytes_are_summed(run, checksum):
    events = Mock()
    with run() as r:
        manifest = msgspec.structs.replace(r.publisher.manifest, checksum=checksum)
        packed = iter([64, 128])
        parts = (r.publisher._buffer, {}, events.fence, packed, events.known)
        assert Offer(1, manifest, *parts, finite_check=True).sums(follow=True) == []
        whole = checksum != "none"
        assert [name for name, *_ in events.mock_calls] == (["fence.wait_read", "known.forget"] if whole else [])
        assert list(packed) == ([64, 128] if whole else [128])


def test_what_a_sender_follows_is_the_stream_on_which_a_version_is_packed(run, monkeypatch):
    """A mark without an event would say that bytes are there whose copies are only queued."""
    recorded, stream = [], Mock()
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the trainer's")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr("inflight.weights.pack.PART_BYTES", 200 * 16 * 2)
    with run() as r:
        r.publisher._fence._stream = stream  # as on CUDA
        r.publisher._pack(1)
        stream.wait_stream.assert_called_once_with("the trainer's")
        assert recorded == [stream, stream], "after the embedding and at the end"


@pytest.mark.parametrize("follow", [True, False])
def test_ranks_are_told_of_a_version_when_its_sums_are_known_or_it_may_be_followed(follow):
    events = Mock()
    events.sums.return_value = []
    session = Mock(attempts=iter([1]), clock=lambda: 1.0, config=QUICK, outbox=events.outbox)
    attempt = Attempt(Mock(version=1, unsound=None, sums=events.sums), session, ["g0.r0"])
    assert attempt.announce(follow=follow)
    assert [name for name, *_ in events.mock_calls] == ["sums", "outbox.send"]
    events.sums.assert_called_once_with(follow=follow)


def test_a_version_is_released_while_it_is_packed_and_its_publication_returns_afterwards(run, monkeypatch):
    events = []
    with run(g0=1) as r:
        r.joined("g0")
        release, settle = PublisherLoop.release, ReadFence.settle
        monkeypatch.setattr(PublisherLoop, "release", lambda *given: (events.append("released"), release(*given)))
        monkeypatch.setattr(ReadFence, "settle", lambda fence: (events.append("settled"), settle(fence)))
        r.publish(1)
        assert events == ["released", "settled"]


@pytest.mark.parametrize("follows", [True, False])
def test_a_channel_announces_early_for_a_sender_that_follows(follows):
    done = threading.Event()
    sender = Mock(follows=follows, rendezvous="here", send=Mock(side_effect=lambda *_: done.set()))
    attempt = Mock(announce=Mock(return_value=True))
    channel = Channel("g0", sender)
    channel.submit(attempt)
    assert done.wait(20)
    attempt.announce.assert_called_once_with(follow=follows)
    sender.send.assert_called_once_with(attempt.offer.buffer, attempt.offer.manifest.buckets, attempt.offer.packed)
    channel.close()
    assert channel.join(20)


def test_parameters_of_each_dtype_are_checked_and_large_ones_are_no_inf():
    views = {"a": torch.full((8,), 3e38), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(2)}
    require_finite(1, views)
    for name, kind in (("b", "bfloat16"), ("c", "float32")):
        bad = views | {name: views[name] * torch.inf}
        with pytest.raises(
            NotFinite, match=rf"^version 2 is rejected: {name} holds NaN or Inf \(. of . values, in {kind}"
        ):
            require_finite(2, bad)


def test_a_check_that_breaks_ends_publishing(run, monkeypatch):
    with run(g0=1) as r:
        r.joined("g0")
        broken = Mock(side_effect=RuntimeError("CUDA error"))
        monkeypatch.setattr("inflight.weights.publish.offer.require_finite", broken)
        r.publish(1)
        with pytest.raises(PublishError, match=r"publishing has ended: RuntimeError\('CUDA error'\)"):
            r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 0}


def test_an_error_in_the_commit_after_a_check_ends_publishing(run, check, monkeypatch):
    with run(g0=1) as r:
        r.joined("g0")
        monkeypatch.setattr(r.publisher._loop.protocol, "checked", Mock(side_effect=AssertionError("IDLE → READY")))
        r.publish(1)
        eventually(lambda: r.replica().attempt.ready, "Ready")
        check.go[1].set()
        with pytest.raises(PublishError, match=r"publishing has ended: AssertionError\('IDLE → READY'\)"):
            r.publisher.flush(20)


def test_closing_ends_a_check_before_it_returns(run, monkeypatch):
    """A thread that is in torch when the interpreter ends makes the process abort."""
    began, ended = [], []

    def held(version, views):
        began.append(version)
        assert r.publisher._loop._closing.wait(30)
        time.sleep(0.5)  # as the rest of a check
        ended.append(version)

    with run(g0=1) as r:
        r.joined("g0")
        monkeypatch.setattr("inflight.weights.publish.offer.require_finite", held)
        r.publish(1)
        eventually(lambda: began == [1] and r.replica().attempt.ready, "Ready")
        r.publisher.close()
        assert ended == [1]
        assert r.state() is ReplicaState.SENDING, "its end commits nothing any more"


def test_a_version_is_checked_though_no_generator_is_sent_it(run):
    with run() as r:
        r.publish(1)
        r.publisher.require_sound()
        with torch.no_grad():
            r.model[2].bias[7] = float("inf")
        r.publisher.publish(2)
        with pytest.raises(NotFinite, match=r"^version 2 is rejected: 2\.bias holds NaN or Inf"):
            r.publisher.require_sound()


def test_without_the_finite_check_anything_is_sent(run):
    with run(dataclasses.replace(QUICK, finite_check=False)) as r:
        r.joined("g0")
        with torch.no_grad():
            r.model[2].bias[7] = float("inf")
        r.publisher.publish(1)
        r.publisher.require_sound()
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 1}


def test_large_finite_values_are_sent(run):
    """Their sum overflows, they do not."""
    with run(g0=1) as r:
        r.joined("g0")
        with torch.no_grad():
            r.model[2].weight.fill_(3e38)
        r.publisher.publish(1)
        r.publisher.flush(20)
        assert r.publisher.committed == {"g0": 1}


def test_the_readmes_example_of_a_users_trainer(tmp_path, monkeypatch, capsys):
    """Its lines as they stand, from the printed configuration to the generator's end."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert "inflight launch --config-name tiny run_dir=runs/own --print > runs/own/config.yaml" in readme
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "own" / "bus").mkdir(parents=True)
    assert launch.main(["--config-name", "tiny", "run_dir=runs/own", "--print"]) == 0
    (tmp_path / "runs" / "own" / "config.yaml").write_text(capsys.readouterr().out)
    generator = FakeGenerator(load("runs/own").endpoint("weights")).start()
    exec(code, {})
    eventually(lambda: any(isinstance(message, Finish) for message in generator.heard), "the end")
    assert generator.version == 100
    generator.close()


def test_the_routes_are_in_the_file(tmp_path):
    file = tmp_path / "bus" / "routes.json"
    with Listener(f"ipc://{tmp_path}/w", BUS) as listener:
        source = WeightSource(nn.Linear(16, 16), "float32")
        publisher = Publisher(source, listener, QUICK, version=0, ranks={"g0": 1}, routes_file=file)

        def read():
            return msgspec.json.decode(file.read_bytes(), type=Routes)

        eventually(file.exists)
        assert read() == Routes(version=0, generators={})
        generator = FakeGenerator(listener.endpoint).start()
        eventually(lambda: read().generators, "the route")
        route = read().generators["g0"]
        assert (route.url, route.version, route.incarnation) == ("http://127.0.0.1:1", 0, generator.incarnation)
        publisher.publish(1)
        eventually(lambda: read().version == 1 and read().generators["g0"].version == 1)
        generator.close()
        eventually(lambda: not read().generators, "its leaving")
        publisher.close()


def test_who_waits_for_a_generator_finds_its_route_when_it_has_joined(tmp_path, monkeypatch):
    file, write, routed = tmp_path / "bus" / "routes.json", RoutesFile.write, []

    def slow(self, wanted):
        if wanted.generators and not routed:
            time.sleep(0.3)
        write(self, wanted)

    monkeypatch.setattr(RoutesFile, "write", slow)
    with Listener(f"ipc://{tmp_path}/w", BUS) as listener:
        source = WeightSource(nn.Linear(16, 16), "float32")
        publisher = Publisher(source, listener, QUICK, version=0, ranks={"g0": 1}, routes_file=file)

        def wait():
            publisher.wait_joined(20)
            routed.extend(msgspec.json.decode(file.read_bytes(), type=Routes).generators)

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(file.exists)
        generator = FakeGenerator(listener.endpoint).start()
        waiting.join(20)
        assert routed == ["g0"]
        generator.close()
        publisher.close()


def test_a_pinned_generator_gets_the_bytes_of_newer_versions_and_makes_the_newest_live_afterwards(run):
    with run() as run:
        (g0,) = run.joined("g0")
        run.publish(1)
        pin = run.publisher.pin(1, 60, routed=False)
        eventually(lambda: pin.generator)
        assert not pin.ended
        assert (pin.generator, pin.route.url, pin.route.incarnation) == ("g0", g0.url, g0.incarnation)
        assert run.routed() == set()
        for version in (2, 3):
            run.publish(version)  # would wait for a commit that does not come, if a pin kept the buffer
            why = {"g0": f"READY: version {version} waits in the shadow, version 1 is pinned"}
            eventually(lambda version=version, why=why: run.publisher.flush(20) == why)
        assert g0.commits == [1]
        assert run.publisher.committed == {"g0": 1}
        run.publisher.unpin(pin, "done")
        eventually(lambda: run.publisher.committed == {"g0": 3})
        run.publisher.flush(20)
        assert g0.commits == [1, 3]
        assert {float(tensor.flatten()[0]) for tensor in g0.shadows[0].live.values()} == {3.5}
        assert run.routed() == {"g0"}
        assert [type(event) for event in run.events] == [Swap, Superseded, Swap]
        assert pin.ended == "done"
