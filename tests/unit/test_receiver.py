"""One rank's receiver against a publisher played by the test: order, refusals, and that live is never touched."""

import threading

import msgspec
import pytest
import torch
from fake_generator import BUS, FakeShadow, eventually

from inflight.bus import Link, Listener, Lost, Received
from inflight.messages import (
    Abort,
    Aborted,
    Enquire,
    Failed,
    Prepare,
    RankHello,
    RankSwapped,
    Ready,
    Refused,
    Welcome,
)
from inflight.types import ParamMeta
from inflight.weights.pack import ChecksumError, checksums, content_digest
from inflight.weights.plan import digest, plan
from inflight.weights.receive.rank_state import ReceiverState
from inflight.weights.receive.receiver import WeightReceiver
from inflight.weights.receive.shadow import ManifestMismatch, SwapRefused, TornWeights
from inflight.weights.transport.base import TransportError

MANIFEST = plan([ParamMeta(name="w", shape=(300,), dtype="float32")], {}, 500, "crc32")
RANK = "g0.r0"
OTHER = "f" * 16
"""A publisher that the rank has not heard of before."""


def bytes_of(version):
    return torch.full((MANIFEST.total_bytes,), version, dtype=torch.uint8)


class FakeTransport:
    """Gives what the test puts into it; `closed` and `error` as a real one."""

    def __init__(self, events):
        self.events, self.source, self.closed = events, None, False
        self.gate, self.stuck = threading.Event(), False

    def receive(self, buffer, buckets):
        self.events.append("receive")
        assert buckets == MANIFEST.buckets
        assert self.gate.wait(30)
        if self.source is None:
            raise TransportError("receive, bucket 1 of 3: Connection closed by peer")
        buffer.copy_(self.source)

    def close(self):
        self.closed = True
        self.gate.set()
        if self.stuck:
            raise TransportError("close: the device still copies")


class Publisher:
    """The other end of the link, by hand."""

    def __init__(self, listener):
        self.listener, self.transports = listener, []
        self.shadow = FakeShadow()
        self.attempt = 0
        self.reports = []
        """Every RankSwapped that has come, in order; `next` returns the other messages."""

    def receiver(self, version=0):
        link = Link(self.listener.endpoint, RANK, BUS)
        hello = RankHello(generator="g0", rank=0, world_size=1, version=version, incarnation="0" * 16)
        made = WeightReceiver(link, self.shadow, hello, connect=self.connect)
        made.start()
        assert self.next() == hello
        return made

    def connect(self, welcome):
        self.transports.append(FakeTransport(self.shadow.events))
        return self.transports[-1]

    def next(self):
        got = self.listener.receive(10)
        assert isinstance(got, Received), got
        assert got.peer == RANK
        if isinstance(got.message, RankSwapped):
            self.reports.append(got.message)
            return self.next()
        return got.message

    def send(self, message):
        self.listener.send(RANK, message)

    def welcome(self, **changes):
        message = Welcome(
            manifest=MANIFEST,
            manifest_digest=digest(MANIFEST),
            transport="gloo",
            rendezvous="127.0.0.1:1/x",
            transport_rank=1,
            transport_size=2,
            timeout_s=5.0,
        )
        self.send(msgspec.structs.replace(message, **changes))

    def prepare(self, version, source=True, gate=True, **changes):
        eventually(lambda: self.transports, "joining")
        transport = self.transports[-1]
        transport.source = bytes_of(version) if source else None
        transport.gate.set() if gate else transport.gate.clear()
        self.attempt += 1
        message = Prepare(
            version=version,
            attempt=self.attempt,
            manifest_digest=digest(MANIFEST),
            checksums=checksums(MANIFEST, bytes_of(version)),
        )
        self.send(msgspec.structs.replace(message, **changes))


@pytest.fixture
def publisher(tmp_path):
    with Listener(f"ipc://{tmp_path}/w", BUS) as listener:
        yield Publisher(listener)


@pytest.fixture
def receiver(publisher):
    receiver = publisher.receiver()
    yield receiver
    receiver.close()


def expect_ready(publisher, version):
    ready = publisher.next()
    assert isinstance(ready, Ready), ready
    assert (ready.version, ready.digest) == (version, content_digest(checksums(MANIFEST, bytes_of(version))))


def live(publisher):
    return publisher.shadow.live.get("w")


def test_versions_are_received_verified_built_and_swapped_in_order(publisher, receiver):
    publisher.welcome()
    for version in (1, 2, 5):
        publisher.prepare(version)
        expect_ready(publisher, version)
        assert receiver.state is ReceiverState.READY
        assert receiver.swap(version) == 0.001
        assert (receiver.state, receiver.version) == (ReceiverState.IDLE, version)
        assert torch.equal(live(publisher).view(torch.uint8), bytes_of(version)[:1200])
    assert publisher.shadow.events == ["begin", "receive", "build", "swap"] * 3
    assert publisher.transports[0].closed is False


def test_a_swap_is_reported_under_its_attempt_before_anything_later(publisher, receiver):
    publisher.welcome(publisher=OTHER)
    publisher.prepare(1, publisher=OTHER)
    expect_ready(publisher, 1)
    publisher.shadow.fail["build"] = RuntimeError("no room")
    publisher.prepare(2, publisher=OTHER)  # an attempt that fails, since the version before is still ready
    assert publisher.next().attempt == 2
    assert publisher.reports == []
    receiver.swap(1)
    publisher.send(Enquire())
    assert publisher.next().version == 1
    assert publisher.reports == [RankSwapped(version=1, attempt=1, publisher=OTHER, gap_s=0.001)]


@pytest.mark.parametrize(
    ("held", "version", "reported"), [(None, 0, False), (None, 7, False), (4, 4, False), (4, 5, True), (4, 9, True)]
)
def test_a_first_version_and_one_of_the_same_number_are_for_the_engine_to_report(publisher, held, version, reported):
    receiver = publisher.receiver(held)
    publisher.welcome(publisher=OTHER)
    publisher.prepare(version, publisher=OTHER)
    expect_ready(publisher, version)
    receiver.swap(version)
    publisher.send(Enquire())
    assert publisher.next().version == version
    assert [report.version for report in publisher.reports] == ([version] if reported else [])
    receiver.close()


def test_only_the_ready_version_can_be_swapped_in(publisher, receiver):
    with pytest.raises(SwapRefused, match=r"version 1 is not ready on g0\.r0: JOINING"):
        receiver.swap(1)
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    with pytest.raises(SwapRefused, match=r"version 2 is not ready on g0\.r0: READY, version 1 in hand"):
        receiver.swap(2)
    receiver.swap(1)
    with pytest.raises(SwapRefused, match="IDLE"):
        receiver.swap(1)
    assert publisher.shadow.events.count("swap") == 1


def test_a_swap_is_refused_at_once_while_the_version_is_still_coming(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1, gate=False)
    eventually(lambda: "receive" in publisher.shadow.events, "receiving")
    with pytest.raises(SwapRefused, match="RECEIVING, version 1 in hand"):
        receiver.swap(1)
    publisher.transports[0].gate.set()
    expect_ready(publisher, 1)


@pytest.mark.parametrize("phase", ["begin", "build"])
def test_what_fails_in_the_shadow_is_reported_and_discarded(publisher, receiver, phase):
    publisher.welcome()
    publisher.shadow.fail[phase] = MemoryError("no room for q_proj")
    publisher.prepare(1)
    failed = publisher.next()
    reported = {"begin": "prepare", "build": "build"}[phase]
    reason = "MemoryError: no room for q_proj"
    assert failed == Failed(version=1, attempt=1, phase=reported, reason=reason, poisoned=False)
    assert publisher.shadow.events[-1] == "discard"
    assert "swap" not in publisher.shadow.events
    with pytest.raises(SwapRefused, match="IDLE"):
        receiver.swap(1)
    # Before all bytes have arrived the others wait for this rank in the transport: it must let them go.
    if phase == "begin":
        eventually(lambda: publisher.transports[0].closed, "closing its end, after saying why")
    assert publisher.transports[0].closed == (phase == "begin")


@pytest.mark.parametrize("phase", ["begin", "build"])
def test_weights_that_can_never_be_loaded_have_their_own_phase(publisher, receiver, phase):
    publisher.welcome()
    publisher.shadow.fail[phase] = ManifestMismatch("the engine has no parameter for rotary")
    publisher.prepare(1)
    failed = publisher.next()
    assert (failed.phase, failed.reason) == ("fit", "ManifestMismatch: the engine has no parameter for rotary")
    assert publisher.shadow.events[-1] == "discard"


@pytest.mark.parametrize(
    ("version", "whose", "taken"), [(4, "", False), (4, OTHER, True), (5, OTHER, True), (3, OTHER, False)]
)
def test_a_number_that_is_live_is_taken_from_another_publisher_alone(publisher, receiver, version, whose, taken):
    publisher.welcome()
    publisher.prepare(4)
    expect_ready(publisher, 4)
    receiver.swap(4)
    publisher.attempt = 0
    publisher.welcome(publisher=whose)
    eventually(lambda: len(publisher.transports) == 2, "joining")
    publisher.prepare(version, publisher=whose)
    answer = publisher.next()
    assert isinstance(answer, Ready) == taken, answer
    if taken:
        receiver.swap(version)
    else:
        assert answer.reason == f"RuntimeError: version {version} is not newer than the live version 4"
    publisher.send(Enquire())
    hello = publisher.next()
    assert (hello.version, hello.publisher) == ((version, whose) if taken else (4, ""))


def test_a_version_of_another_publisher_than_the_welcomes_is_refused(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1, publisher=OTHER)
    assert "of another publisher than this rank was welcomed by" in publisher.next().reason


def test_a_rank_that_was_sent_nothing_holds_no_version(publisher):
    receiver = publisher.receiver(version=None)
    assert receiver.version is None
    publisher.welcome()
    publisher.prepare(0)
    expect_ready(publisher, 0)
    receiver.swap(0)
    assert receiver.version == 0
    receiver.close()


def test_after_a_failed_build_the_next_version_comes_over_the_same_transport(publisher, receiver):
    publisher.welcome()
    publisher.shadow.fail["build"] = RuntimeError("x")
    publisher.prepare(1)
    assert isinstance(publisher.next(), Failed)
    publisher.shadow.fail.clear()
    publisher.prepare(2)
    expect_ready(publisher, 2)
    receiver.swap(2)


def test_a_broken_transfer_is_reported_and_a_new_welcome_heals_it(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1, source=False)
    failed = publisher.next()
    assert (failed.phase, failed.poisoned) == ("receive", False)
    assert "bucket 1 of 3" in failed.reason
    assert publisher.transports[0].closed
    publisher.prepare(2)
    assert "no transport" in publisher.next().reason
    publisher.welcome()
    eventually(lambda: len(publisher.transports) == 2)
    publisher.prepare(3)
    expect_ready(publisher, 3)


def test_a_transport_that_may_still_write_is_the_last(publisher, receiver):
    """The next one would fill the same shadow. The engine lives on, and its trainer finds the rank lost."""
    publisher.welcome()
    eventually(lambda: publisher.transports, "joining")
    publisher.transports[0].stuck = True
    publisher.prepare(1, source=False)
    eventually(lambda: receiver.state is ReceiverState.FAILED)
    assert "still copies" in receiver.error
    assert isinstance(publisher.listener.receive(10), Lost)
    assert len(publisher.transports) == 1
    with pytest.raises(SwapRefused, match="still copies"):
        receiver.swap(1)


def test_a_transport_that_may_still_write_keeps_no_rank_from_ending(publisher, receiver):
    publisher.welcome()
    eventually(lambda: publisher.transports, "joining")
    publisher.transports[0].stuck = True
    receiver.close()
    assert not receiver._thread.is_alive()
    assert isinstance(publisher.listener.receive(10), Lost)


def test_bytes_that_are_not_those_sent_are_never_built(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1, checksums=checksums(MANIFEST, bytes_of(9)))
    failed = publisher.next()
    assert (failed.phase, failed.version) == ("verify", 1)
    assert "buckets [0, 1, 2] of 3" in failed.reason
    assert publisher.shadow.events == ["begin", "receive", "discard"]
    assert live(publisher) is None


def test_a_transport_that_verifies_itself_is_kept_when_bytes_are_not_those_sent(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1, source=False)
    assert publisher.next().phase == "receive"
    publisher.welcome()
    eventually(lambda: len(publisher.transports) == 2)
    receive = publisher.transports[1].receive

    def harmed(buffer, buckets):
        receive(buffer, buckets)
        raise ChecksumError("bytes differ from those sent in 1 of 3 runs")

    publisher.transports[1].receive = harmed
    publisher.prepare(2)
    failed = publisher.next()
    assert (failed.phase, failed.poisoned) == ("verify", False)
    publisher.transports[1].receive = receive
    publisher.prepare(3)
    expect_ready(publisher, 3)
    assert publisher.shadow.events == ["begin", "receive", "discard"] * 2 + ["begin", "receive", "build"]


@pytest.mark.parametrize(
    ("text", "version", "changes"),
    [
        ("another manifest", 4, {"manifest_digest": "0" * 64}),
        ("version 3 is not newer than the live version 3", 3, {}),
    ],
)
def test_a_prepare_that_does_not_fit_is_refused_before_the_shadow_is_touched(publisher, text, version, changes):
    receiver = publisher.receiver(version=3)
    publisher.welcome()
    publisher.prepare(version, **changes)
    failed = publisher.next()
    assert failed.phase == "prepare"
    assert text in failed.reason
    assert publisher.shadow.events == []
    receiver.close()


def test_a_second_prepare_before_the_commit_is_refused_and_the_ready_one_kept(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    publisher.prepare(2)
    assert "READY with version 1" in publisher.next().reason
    receiver.swap(1)


def test_an_abort_takes_a_ready_version_away(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    publisher.send(Abort(version=1, attempt=0, reason="another, earlier"))
    assert publisher.next() == Aborted(version=1, attempt=0)
    assert receiver.state is ReceiverState.READY
    publisher.send(Abort(version=1, attempt=1, reason="g0.r1 failed"))
    assert publisher.next() == Aborted(version=1, attempt=1)
    assert receiver.state is ReceiverState.IDLE
    assert publisher.shadow.events[-1] == "discard"
    with pytest.raises(SwapRefused):
        receiver.swap(1)
    publisher.prepare(2)
    expect_ready(publisher, 2)
    assert receiver.swap(2) == 0.001


def test_an_abort_during_the_transfer_takes_effect_before_the_build(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1, gate=False)
    eventually(lambda: "receive" in publisher.shadow.events, "receiving")
    publisher.send(Abort(version=1, attempt=1, reason="late"))
    eventually(lambda: receiver._publisher.link._inbox.qsize() == 1, "the abort's coming")
    publisher.transports[0].gate.set()
    assert publisher.next().reason == "RuntimeError: aborted by the publisher"
    assert publisher.next() == Aborted(version=1, attempt=1)
    assert publisher.shadow.events == ["begin", "receive", "discard"]
    publisher.prepare(2)
    expect_ready(publisher, 2)


def test_a_swap_waits_for_nothing_while_an_abort_discards(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    publisher.shadow.hold["discard"] = threading.Event()
    publisher.send(Abort(version=1, attempt=1, reason="late"))
    eventually(lambda: receiver.state is ReceiverState.DISCARDING)
    with pytest.raises(SwapRefused, match="DISCARDING"):
        receiver.swap(1)
    publisher.shadow.hold["discard"].set()
    eventually(lambda: receiver.state is ReceiverState.IDLE)


def test_a_swap_that_fails_poisons_the_rank(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    publisher.shadow.fail["swap"] = RuntimeError("half of it is bound")
    with pytest.raises(RuntimeError, match="half of it"):
        receiver.swap(1)
    assert publisher.next() == Failed(
        version=1, phase="commit", reason="RuntimeError: half of it is bound", poisoned=True
    )
    assert (receiver.state, receiver.version) == (ReceiverState.POISONED, 0)
    publisher.shadow.fail.clear()
    publisher.prepare(2)
    again = publisher.next()
    assert (again.phase, again.poisoned, again.reason) == ("commit", True, "RuntimeError: half of it is bound")
    with pytest.raises(SwapRefused, match=r"POISONED.*half of it is bound"):
        receiver.swap(1)


def test_a_refused_rank_ends_and_says_why(publisher, receiver):
    publisher.send(Refused(reason="world_size 1, expected 2"))
    eventually(lambda: receiver.state is ReceiverState.FAILED)
    with pytest.raises(SwapRefused, match="expected 2"):
        receiver.swap(1)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("ManifestError: buckets cover", {"manifest": msgspec.structs.replace(MANIFEST, buckets=MANIFEST.buckets[:1])}),
        ("digest", {"manifest_digest": "0" * 64}),
        ("transport rank 2 of 2", {"transport_rank": 2}),
    ],
)
def test_a_welcome_that_can_not_be_trusted_is_not_taken(publisher, receiver, text, changes):
    publisher.welcome(**changes)
    eventually(lambda: receiver.state is ReceiverState.FAILED)
    assert text in receiver.error
    assert publisher.transports == []


def test_a_lost_publisher_is_greeted_again_and_what_is_ready_is_kept(publisher, receiver, tmp_path):
    """The engine may have got the Commit of it; a new Welcome says that it was not."""
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    receiver.swap(1)
    publisher.prepare(2)
    expect_ready(publisher, 2)
    publisher.listener.close()
    eventually(lambda: receiver._alone, "noticing the loss")
    assert receiver.state is ReceiverState.READY
    with Listener(f"ipc://{tmp_path}/w", BUS) as publisher.listener:
        assert publisher.next().version == 1
        publisher.transports.clear()
        publisher.welcome()
        publisher.attempt = 0
        publisher.prepare(2)
        expect_ready(publisher, 2)
        assert publisher.shadow.events[-4:] == ["discard", "begin", "receive", "build"]
        assert torch.equal(live(publisher).view(torch.uint8), bytes_of(1)[:1200])
        receiver.swap(2)


def test_a_lost_publisher_finds_an_idle_rank_without_transport(publisher, receiver, tmp_path):
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    receiver.swap(1)
    publisher.listener.close()
    eventually(lambda: receiver.state is ReceiverState.JOINING, "noticing the loss")
    assert publisher.transports[0].closed
    with Listener(f"ipc://{tmp_path}/w", BUS) as publisher.listener:
        assert publisher.next().version == 1


def test_an_enquiry_is_answered_with_what_is_live(publisher, receiver):
    publisher.welcome()
    publisher.prepare(4)
    expect_ready(publisher, 4)
    for version in (0, 4):
        publisher.send(Enquire())
        hello = publisher.next()
        assert isinstance(hello, RankHello)
        assert hello.version == version
        if version == 0:
            receiver.swap(4)


def test_a_repeated_or_late_prepare_is_not_begun(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    publisher.prepare(1, attempt=1)
    publisher.send(Abort(version=2, attempt=9, reason="came before its Prepare"))
    assert publisher.next() == Aborted(version=2, attempt=9)
    publisher.prepare(2, attempt=9)
    publisher.send(Enquire())
    assert isinstance(publisher.next(), RankHello)
    assert publisher.shadow.events.count("begin") == 1


@pytest.mark.parametrize("message", ["welcome", "abort"])
def test_nothing_touches_the_shadow_during_a_swap(publisher, receiver, message):
    publisher.welcome()
    publisher.prepare(1)
    expect_ready(publisher, 1)
    publisher.shadow.hold["swap"] = threading.Event()
    swap = threading.Thread(target=receiver.swap, args=(1,))
    swap.start()
    eventually(lambda: receiver.state is ReceiverState.SWAPPING)
    if message == "welcome":
        publisher.welcome()
        publisher.attempt = 0
        publisher.transports[-1].source = bytes_of(2)
        publisher.prepare(2)
    else:
        publisher.send(Abort(version=1, attempt=1, reason="late"))
    assert publisher.listener.receive(0.5) is None
    assert (receiver.state, publisher.shadow.events[-1]) == (ReceiverState.SWAPPING, "swap")
    publisher.shadow.hold["swap"].set()
    swap.join(20)
    assert receiver.version == 1
    assert "discard" not in publisher.shadow.events
    if message == "abort":
        assert publisher.next() == Aborted(version=1, attempt=1)
        assert receiver.state is ReceiverState.IDLE


def test_a_swap_that_turns_out_to_have_failed_poisons_the_rank(publisher, receiver):
    publisher.welcome()
    publisher.shadow.fail["begin"] = TornWeights("the remap failed")
    publisher.prepare(1)
    failed = publisher.next()
    assert (failed.phase, failed.poisoned) == ("commit", True)
    assert receiver.state is ReceiverState.POISONED


def test_a_swap_that_turns_out_to_have_failed_when_it_is_welcomed_poisons_the_rank(publisher, receiver):
    """A shadow is planned for the manifest before a transport is made to fill it; that may find out."""

    def planned(welcome):
        raise TornWeights("the remap failed")

    receiver._connect = planned
    publisher.welcome()
    failed = publisher.next()
    assert isinstance(failed, Failed), failed
    assert (failed.version, failed.phase, failed.poisoned) == (0, "commit", True)
    assert failed.reason == "TornWeights: the remap failed"
    assert receiver.state is ReceiverState.POISONED


def test_a_welcome_to_a_transport_that_is_gone_is_no_end(publisher, receiver):
    def gone(welcome):
        raise TransportError("connect: no rendezvous")

    connect, receiver._connect = receiver._connect, gone
    publisher.welcome()
    eventually(lambda: receiver.state is ReceiverState.IDLE)
    publisher.transports.append(FakeTransport([]))
    publisher.prepare(1)
    assert "no transport" in publisher.next().reason
    receiver._connect = connect
    publisher.welcome()
    eventually(lambda: len(publisher.transports) == 2)
    publisher.prepare(2)
    expect_ready(publisher, 2)


def test_closing_ends_a_transfer_and_can_be_repeated(publisher, receiver):
    publisher.welcome()
    publisher.prepare(1, source=False, gate=False)
    eventually(lambda: "receive" in publisher.shadow.events, "receiving")
    receiver.close()
    receiver.close()
    assert not receiver._thread.is_alive()
    with pytest.raises(SwapRefused, match="CLOSED"):
        receiver.swap(1)
