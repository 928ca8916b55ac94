"""The bus over real sockets: order, loss, refusals and bounds."""

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq
from fake_generator import eventually

from inflight.bus import Arrivals, BusError, Link, Listener, Lost, PeerLost, Received
from inflight.bus.endpoint import HIGH_WATER, MAX_QUEUED, _Context
from inflight.config import BusConfig
from inflight.messages import SCHEMA, Abort, Commit, Goodbye, Heartbeat, Refused, Status, WireError, decode, encode

PATIENT = BusConfig(heartbeat_s=0.05, dead_after_s=20.0)
QUICK = BusConfig(heartbeat_s=0.05, dead_after_s=0.6)
"""For silence that is waited for."""
KEEPS_ALIVE = 2
"""A timer in /proc/net/tcp that is none of a transmission."""


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/s"


def wait_for(receive, kind, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        got = receive(0.2)
        if isinstance(got, kind):
            return got
    raise AssertionError(f"no {kind} came")


def test_messages_keep_their_order_both_ways(endpoint):
    with Listener(endpoint, PATIENT) as listener, Link(endpoint, "g0.r0", PATIENT) as link:
        for version in range(1, 200):
            link.send(Commit(version=version))
        got = [wait_for(listener.receive, Received).message.version for _ in range(1, 200)]
        assert got == list(range(1, 200))
        for version in range(200):
            listener.send("g0.r0", Commit(version=version))
        assert [link.receive(20).version for _ in range(200)] == list(range(200))


def test_a_link_may_come_before_its_listener(endpoint):
    with Link(endpoint, "a0", PATIENT) as link:
        link.send(Commit(version=1))
        time.sleep(0.2)
        with Listener(endpoint, PATIENT) as listener:
            assert wait_for(listener.receive, Received) == Received("a0", Commit(version=1))


def test_a_connection_whose_host_is_gone_is_not_kept_for_the_whole_run():
    """A listener only answers: the kernel notices that by itself if it probes."""

    def timers():
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        established = [row for row in rows if row[3] == "01" and int(row[1].partition(":")[2], 16) == port]
        return [(int(row[5].partition(":")[0], 16), int(row[5].partition(":")[2], 16) / 100) for row in established]

    with Listener("tcp://127.0.0.1:*", PATIENT) as listener, Link(listener.endpoint, "g0", PATIENT):
        port = int(listener.endpoint.rpartition(":")[2])
        deadline = time.monotonic() + 20
        while not any(timer == KEEPS_ALIVE for timer, _ in timers()):
            assert time.monotonic() < deadline, timers()
            time.sleep(0.01)
        assert [seconds <= 900 for timer, seconds in timers() if timer == KEEPS_ALIVE] != [False]


def test_sending_to_a_stranger_is_an_error(endpoint):
    with Listener(endpoint, PATIENT) as listener, pytest.raises(BusError, match=r"g9\.r0 is not connected"):
        listener.send("g9.r0", Commit(version=1))


def test_a_silent_peer_is_lost_once_and_a_living_one_is_not(endpoint):
    beats = BusConfig(heartbeat_s=0.05, dead_after_s=1.5)
    with Listener(endpoint, beats) as listener, Link(endpoint, "alive", beats):
        context = zmq.Context()
        dying = context.socket(zmq.DEALER)  # not a Link, which would say goodbye
        dying.setsockopt(zmq.IDENTITY, b"dying")
        dying.connect(endpoint)
        dying.send(encode(Commit(version=1)))
        wait_for(listener.receive, Received)
        dying.close()
        assert wait_for(listener.receive, Lost) == Lost("dying")
        assert listener.receive(1.0) is None
        assert listener.peers() == {"alive"}
        context.destroy(linger=0)


def test_a_peer_that_closes_is_lost_at_once_and_after_all_that_it_said(endpoint):
    """As long as it says no more than zmq holds: what lies beyond in the connection, zmq may drop when that closes."""
    patient = BusConfig(heartbeat_s=0.05, dead_after_s=1000.0)
    with Listener(endpoint, patient) as listener:
        with Link(endpoint, "a0", patient) as link:
            for version in range(HIGH_WATER // 2):
                link.send(Commit(version=version))
        got = [wait_for(listener.receive, Received | Lost) for _ in range(HIGH_WATER // 2 + 1)]
        assert got == [*(Received("a0", Commit(version=version)) for version in range(HIGH_WATER // 2)), Lost("a0")]
        assert listener.peers() == set()


def test_a_name_belongs_to_the_last_sender_and_a_late_goodbye_does_not_lose_it(endpoint):
    """A process that was restarted before its predecessor was gone."""
    with Listener(endpoint, PATIENT) as listener:
        before = Link(endpoint, "g0", PATIENT)
        before.send(Commit(version=1))
        assert wait_for(listener.receive, Received).message == Commit(version=1)
        context = zmq.Context()
        after = context.socket(zmq.DEALER)  # sends no heartbeats: the order of who speaks is this test's
        after.setsockopt(zmq.IDENTITY, b"g0#after")
        after.connect(endpoint)
        before.close()
        assert wait_for(listener.receive, Lost) == Lost("g0")
        after.send(encode(Commit(version=2)))
        assert wait_for(listener.receive, Received).message == Commit(version=2)
        late = context.socket(zmq.DEALER)
        late.setsockopt(zmq.IDENTITY, b"g0#late")
        late.connect(endpoint)
        late.send(encode(Goodbye()))
        listener.send("g0", Commit(version=3))
        assert after.poll(20_000)
        assert after.recv() == encode(Commit(version=3))
        assert listener.peers() == {"g0"}
        context.destroy(linger=0)


def test_a_process_that_wakes_up_after_it_was_replaced_is_not_mistaken_for_its_successor(endpoint, monkeypatch):
    """Not by its messages, nor by its heartbeats: it is refused, and messages to the name still reach the other."""
    with Listener(endpoint, QUICK) as listener, zmq.Context() as context:
        before, after = (context.socket(zmq.DEALER) for _ in range(2))
        for socket, identity in ((before, b"g0#before"), (after, b"g0#after")):
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            socket.send(encode(Commit(version=1)))
            assert wait_for(listener.receive, Received) == Received("g0", Commit(version=1))
        assert wait_for(listener.receive, Lost) == Lost("g0")
        for frame in (encode(Commit(version=2)), encode(Heartbeat())):
            before.send(frame)
            assert before.poll(20_000)
            assert decode(before.recv()) == Refused(reason="another process has taken its place")
        assert listener.peers() == set()
        monkeypatch.setattr(listener, "_config", PATIENT)  # neither sends heartbeats
        after.send(encode(Commit(version=3)))
        assert wait_for(listener.receive, Received) == Received("g0", Commit(version=3))
        before.send(encode(Commit(version=4)))
        assert before.poll(20_000)
        listener.send("g0", Commit(version=5))
        assert after.poll(20_000)
        assert decode(after.recv()) == Commit(version=5)
        assert listener.refusals.counts == {"another process has taken its place": 3}
        before.close()
        after.close()


@pytest.mark.parametrize("names", [1, 3])
def test_the_connections_that_are_remembered_are_bounded(endpoint, monkeypatch, names):
    monkeypatch.setattr("inflight.bus.listener.MAX_PEERS", 2)
    with Listener(endpoint, PATIENT) as listener:
        for number in range(40):
            assert not listener._is_replaced(f"g{number % names}", b"%d" % number)
        assert sum(map(len, listener._known.values())) <= 32


def test_a_link_tells_when_its_listener_dies(endpoint):
    listener = Listener(endpoint, QUICK)
    with Link(endpoint, "a0", QUICK) as link:
        link.send(Commit(version=1))
        wait_for(listener.receive, Received)
        listener.send("a0", Commit(version=2))
        assert link.receive(20) == Commit(version=2)
        listener.close()
        with pytest.raises(PeerLost, match="nothing heard"):
            for _ in range(200):
                link.receive(0.1)


def test_time_in_which_a_process_did_not_run_is_no_silence_of_others(endpoint):
    """As when it is suspended, or a native library holds the GIL. Once it runs, silence counts as ever."""
    with Listener(endpoint, QUICK) as listener, Link(endpoint, "a0", QUICK) as link:
        link.send(Commit(version=1))
        wait_for(listener.receive, Received)
        eventually(lambda: link.listener, "the answer to a heartbeat")
        ctypes.PyDLL(None).usleep(round(2 * QUICK.dead_after_s * 1e6))  # with the GIL
        assert link.receive(0) is None
        assert listener.receive(QUICK.dead_after_s / 2) is None
        assert listener.peers() == {"a0"}
        listener.close()
        with pytest.raises(PeerLost):
            for _ in range(200):
                link.receive(0.1)


LISTEN = """
import os, sys, time
from inflight.bus import BusError, Listener
from inflight.config import BusConfig
try:
    listener = Listener(sys.argv[1], BusConfig())
except BusError as error:
    sys.exit(str(error))
if "fork" not in sys.argv or os.fork() == 0:  # the child says it: its hooks of a fork have run then
    print("listens", flush=True)
time.sleep(60)
"""


def test_a_second_listener_is_refused_and_the_first_hears_on(endpoint):
    """Another process, and this one."""
    with Listener(endpoint, PATIENT) as first:
        second = subprocess.run([sys.executable, "-c", LISTEN, endpoint], capture_output=True, text=True, timeout=180)
        reason = f"can't listen on {endpoint}: process {os.getpid()} already listens there; one listener per address"
        assert second.stderr.strip() == reason
        with pytest.raises(BusError, match=re.escape(reason)):
            Listener(endpoint, PATIENT)
        with Link(endpoint, "g0", PATIENT) as link:
            link.send(Commit(version=1))
            assert wait_for(first.receive, Received) == Received("g0", Commit(version=1))


@pytest.mark.parametrize("forked", [(), ("fork",)])
def test_the_address_of_a_listener_that_was_killed_is_free(endpoint, forked):
    """Also where a child that it has forked lives on."""
    first = subprocess.Popen(
        [sys.executable, "-c", LISTEN, endpoint, *forked], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert first.stdout.readline() == "listens\n"
        os.kill(first.pid, signal.SIGKILL)
        first.wait(20)
        with Listener(endpoint, PATIENT) as again, Link(endpoint, "g0", PATIENT) as link:
            link.send(Commit(version=1))
            assert wait_for(again.receive, Received) == Received("g0", Commit(version=1))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)


def test_a_listener_that_never_appears_is_reported(endpoint):
    began = time.monotonic()
    with Link(endpoint, "a0", PATIENT, first_contact_s=0.3) as link:
        with pytest.raises(PeerLost):
            for _ in range(400):
                link.receive(0.05)
        assert time.monotonic() - began > 0.3, "until then it may still come"


def test_garbage_is_counted_and_changes_nothing(endpoint):
    with Listener(endpoint, PATIENT) as listener:
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.IDENTITY, b"stranger")
        raw.connect(endpoint)
        good = encode(Commit(version=1))
        other = bytes([SCHEMA + 1]) + good[1:]
        for frame in (b"", b"\x01", other, good[:-1], good + b"x", b"\x01\xc1", b"\x01" + b"\x91" * 5000):
            raw.send(frame)
        raw.send(good)
        assert wait_for(listener.receive, Received) == Received("stranger", Commit(version=1))
        assert listener.refusals.total == 7
        context.destroy(linger=0)


def test_a_link_that_is_not_read_bounds_its_queue(endpoint, monkeypatch):
    monkeypatch.setattr("inflight.bus.endpoint.MAX_QUEUED", 50)
    with Link(endpoint, "a0", PATIENT) as link, pytest.raises(BusError, match="does not read"):
        for _ in range(5000):
            link.send(Status(source="a0", values={"x": 1.0}))


def test_the_time_for_which_a_full_queue_keeps_a_link_from_reading_is_no_silence(endpoint):
    with Listener(endpoint, PATIENT) as listener, Link(endpoint, "a0", PATIENT) as link:
        link.send(Commit(version=0))
        wait_for(listener.receive, Received)
        for version in range(MAX_QUEUED):
            listener.send("a0", Commit(version=version))
        eventually(lambda: not link._has_room(), "a full queue")
        listened_s = link._listened_s
        time.sleep(4 * PATIENT.heartbeat_s)
        assert link._listened_s == listened_s


def test_many_threads_may_send(endpoint):
    with Listener(endpoint, PATIENT) as listener, Link(endpoint, "a0", PATIENT) as link:
        threads = [
            threading.Thread(target=lambda n=n: [link.send(Commit(version=1000 * n + i)) for i in range(100)])
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        got = [wait_for(listener.receive, Received).message.version for _ in range(800)]
        for thread in threads:
            thread.join(timeout=20)
        assert sorted(got) == sorted(1000 * n + i for n in range(8) for i in range(100))
        assert [v for v in got if v < 1000] == list(range(100))


def test_closing_delivers_what_was_queued(endpoint):
    with Listener(endpoint, PATIENT) as listener:
        link = Link(endpoint, "a0", PATIENT)
        link.send(Refused(reason="bye"))
        link.close()
        assert wait_for(listener.receive, Received).message == Refused(reason="bye")
        with pytest.raises(BusError, match="closed"):
            link.send(Commit(version=1))


@pytest.mark.parametrize(
    "frame, reason",
    [
        (b"", "0 bytes"),
        (bytes([SCHEMA + 1]) + encode(Commit(version=1))[1:], f"schema {SCHEMA + 1}"),
        (encode(Commit(version=1))[:1] + b"\x82\xa4type\xa5Evil!\xa7version\x01", "not a message"),
        (encode(Abort(version=1, attempt=1, reason="x"))[:-3], "not a message"),
    ],
)
def test_decode_says_what_is_wrong(frame, reason):
    with pytest.raises(WireError, match=reason):
        decode(frame)


def test_negative_versions_and_long_texts_are_refused():
    with pytest.raises(WireError):
        decode(encode(Commit(version=-1)))
    with pytest.raises(WireError):
        decode(encode(Refused(reason="x" * 5000)))


@pytest.mark.parametrize("mistake", ["identity", "address", "never closed"])
def test_an_endpoint_that_nobody_closes_does_not_block_a_garbage_collection(endpoint, mistake):
    """zmq's own context waits for open sockets in its finalizer: without end, in whichever thread collects."""

    def drop():
        if mistake == "never closed":
            context = _Context(io_threads=1)
            cycle = [context, socket := context.socket(zmq.DEALER)]
            cycle.append(cycle)
            socket.connect(endpoint)
            socket.send(b"unsent")
            return
        name, address = ("no name!", endpoint) if mistake == "identity" else ("g0", "nothing://here")
        with pytest.raises(BusError) as raised:
            Link(address, name, PATIENT)
        raised.value.cycle = raised

    drop()
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(20)
    assert not collecting.is_alive()


def test_a_coroutine_reads_a_link_in_order_and_without_a_further_thread(endpoint):
    """What came before it reads, what comes while it waits, nothing in time, and the loss of the other side."""

    async def read(listener, link):
        before = set(threading.enumerate())
        arrivals = Arrivals(link)
        for version in range(3):
            listener.send("a0", Commit(version=version))
        eventually(lambda: link._inbox.qsize() == 3, "their coming")
        found = [await arrivals.receive(20) for _ in range(3)]
        waiting = asyncio.ensure_future(arrivals.receive(60))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        listener.send("a0", Commit(version=3))
        found.append(await asyncio.wait_for(waiting, 20))
        assert [message.version for message in found] == [0, 1, 2, 3]
        assert await arrivals.receive(0.05) is None
        assert set(threading.enumerate()) <= before
        listener.close()
        with pytest.raises(PeerLost):
            while True:
                await arrivals.receive(0.2)

    with Listener(endpoint, QUICK) as listener, Link(endpoint, "a0", QUICK) as link:
        link.send(Commit(version=0))
        wait_for(listener.receive, Received)
        asyncio.run(read(listener, link))


def test_a_link_that_outlives_its_event_loop_receives_on(endpoint):
    async def read(link):
        Arrivals(link)

    with Listener(endpoint, PATIENT) as listener, Link(endpoint, "a0", PATIENT) as link:
        asyncio.run(read(link))
        link.send(Commit(version=0))
        wait_for(listener.receive, Received)
        listener.send("a0", Commit(version=1))
        assert link.receive(20) == Commit(version=1)
        listener.send("a0", Commit(version=2))
        assert link.receive(20) == Commit(version=2)


def test_a_coroutine_that_reads_is_woken_when_the_socket_ends(endpoint):
    async def read(link):
        arrivals = Arrivals(link)
        waiting = asyncio.ensure_future(arrivals.receive(60))
        await asyncio.sleep(0)
        link._read_all = broken
        with pytest.raises(BusError, match="bus thread ended"):
            await asyncio.wait_for(waiting, 20)

    def broken():
        raise RuntimeError("no descriptor")

    with Listener(endpoint, PATIENT), Link(endpoint, "a0", PATIENT) as link:
        asyncio.run(read(link))
