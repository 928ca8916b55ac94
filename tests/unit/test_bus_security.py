"""Strangers on a control socket: what they send changes nothing, is counted, and is logged, not too often."""

import contextlib
import logging
import random
import socket
import stat
import threading
import time

import pytest
import zmq
import zmq.auth

from inflight.bus import BusError, Link, Listener, Lost, Received, keys, make_keys
from inflight.bus import listener as listener_module
from inflight.bus import rate as rate_module
from inflight.bus.rate import Rate
from inflight.bus.refusals import Refusals
from inflight.config import BusConfig, ConfigError
from inflight.messages import Commit, GroupAck, Heartbeat, encode

LIMIT_S = 60.0


def config(**changes):
    return BusConfig(heartbeat_s=0.05, dead_after_s=20.0, **changes)


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys", ["g0", "a0"])
    return tmp_path / "keys"


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def port_of(listener):
    return int(listener.endpoint.rpartition(":")[2])


def test_keys_that_two_threads_make_at_once_are_for_their_owner_alone(folder, monkeypatch):
    """The mask of new files is the process's: without a lock, the first thread restores it while the second writes."""
    create = zmq.auth.create_certificates
    second_began = threading.Event()
    first_ended = threading.Event()

    def created(where, name):
        if name == "g1":
            second_began.wait(0.5)
        else:
            second_began.set()
            first_ended.wait(0.5)
        return create(where, name)

    monkeypatch.setattr(zmq.auth, "create_certificates", created)
    first = threading.Thread(target=lambda: (keys.add_key(folder, "g1"), first_ended.set()))
    second = threading.Thread(target=keys.add_key, args=(folder, "g2"))
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join(LIMIT_S)
    assert [stat.S_IMODE((folder / f"{name}.key_secret").stat().st_mode) for name in ("g1", "g2")] == [0o600, 0o600]


def test_random_bytes_and_port_scanners_are_counted_and_logged(caplog):
    source = random.Random(0)
    with Listener("tcp://127.0.0.1:*", config()) as listener:
        for size in (0, 1, 10, 64, 5000):
            with socket.create_connection(("127.0.0.1", port_of(listener))) as scanner:
                scanner.sendall(source.randbytes(size))
        with socket.create_connection(("127.0.0.1", port_of(listener))) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: listener.refusals.total >= 4)
        with Link(listener.endpoint, "g0", config()) as link:
            link.send(Commit(version=1))
            assert listener.receive(LIMIT_S) == Received("g0", Commit(version=1))
            assert listener.peers() == {"g0"}
    assert "refused from a stranger: handshake" in caplog.text


SAYS = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "any bytes": b"\x93" + random.Random(0).randbytes(500),
    "what is said without keys in old ZeroMQ": b"\x01\x00\x05\x00hello",
    "a greeting of another mechanism": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
}


def test_a_stranger_that_says_nothing_is_disconnected_long_before_zeromq_would(folder, monkeypatch):
    """Else as many as the limit of open files hold all of them for 30 s."""
    assert listener_module.HANDSHAKE_S <= 10
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", 0.5)
    with (
        Listener("tcp://127.0.0.1:*", config(keys=str(folder))) as listener,
        Link(listener.endpoint, "g0", config(keys=str(folder))) as link,
        socket.create_connection(("127.0.0.1", port_of(listener)), LIMIT_S) as stranger,
    ):
        while stranger.recv(1024):  # the listener's greeting; TimeoutError: still connected
            pass
        until(lambda: listener.refusals.counts["handshake not finished"])  # on a slow machine the peer's first as well
        link.send(Commit(version=1))
        assert listener.receive(LIMIT_S) == Received("g0", Commit(version=1))


@pytest.mark.parametrize("what", SAYS)
def test_with_keys_a_peer_without_a_greeting_is_counted_once(folder, what):
    """While a peer is there, and whether the scanner leaves by itself or is dropped."""
    with (
        Listener("tcp://127.0.0.1:*", config(keys=str(folder))) as listener,
        Link(listener.endpoint, "g0", config(keys=str(folder))) as link,
    ):
        until(lambda: listener.peers() == {"g0"})
        for number in range(1, 4):
            with socket.create_connection(("127.0.0.1", port_of(listener))) as scanner:
                with contextlib.suppress(ConnectionError):  # dropped before it has said all
                    scanner.sendall(SAYS[what])
            until(lambda number=number: listener.refusals.total >= number)
        link.send(Commit(version=1))
        assert listener.receive(LIMIT_S) == Received("g0", Commit(version=1))
        link.close()
        assert listener.receive(LIMIT_S) == Lost("g0")
        time.sleep(0.3)  # nothing more is reported of them
        assert listener.refusals.total == 3
        assert len(listener.refusals.counts) == 1


def test_keys_let_in_those_that_are_allowed(folder):
    with Listener("tcp://127.0.0.1:*", config(keys=str(folder))) as listener:
        with Link(listener.endpoint, "g0.r1", config(keys=str(folder))) as link:
            link.send(Commit(version=7))
            assert listener.receive(LIMIT_S) == Received("g0.r1", Commit(version=7))
            listener.send("g0.r1", GroupAck(group_id="q0"))
            assert link.receive(LIMIT_S) == GroupAck(group_id="q0")
        assert listener.refusals.total == 0


def test_a_wrong_key_no_key_and_a_name_of_another_change_nothing(folder, tmp_path, caplog):
    make_keys(tmp_path / "others", ["g0"])
    (tmp_path / "others" / "listener.key").write_bytes((folder / "listener.key").read_bytes())
    with Listener("tcp://127.0.0.1:*", config(keys=str(folder))) as listener:
        with Link(listener.endpoint, "g0", config(keys=str(tmp_path / "others"))) as wrong:
            wrong.send(Commit(version=1))
            until(lambda: listener.refusals.counts["key not allowed"])
        with Link(listener.endpoint, "g0", config()) as plain:
            plain.send(Commit(version=1))
            until(lambda: len(listener.refusals.counts) >= 2)
        (folder / "thief.key_secret").write_bytes((folder / "a0.key_secret").read_bytes())
        (folder / "thief.key_secret").chmod(0o600)
        with Link(listener.endpoint, "thief.r0", config(keys=str(folder))) as thief:
            thief.send(Commit(version=1))
            until(lambda: listener.refusals.counts["under a name that its key does not own"])
        assert listener.receive(0.2) is None
        assert listener.peers() == set()
    assert "key not allowed" in caplog.text


def test_messages_under_a_name_of_another_take_nothing_off_its_rate(folder, monkeypatch):
    monkeypatch.setattr(rate_module, "BURST", 5.0)
    monkeypatch.setattr(rate_module, "PER_SECOND", 0.0001)
    (folder / "a0.key_secret").rename(folder / "g0.key_secret")
    reason = "under a name that its key does not own"
    with Listener("tcp://127.0.0.1:*", config(keys=str(folder))) as listener:
        with Link(listener.endpoint, "g0", config(keys=str(folder))) as thief:
            for _ in range(20):
                thief.send(Commit(version=1))
            until(lambda: listener.refusals.counts[reason] >= 20)
        assert listener.refusals.counts["too many messages"] == 0


@pytest.fixture
def context():
    """Of a test's own sockets; a test that fails does not wait for them."""
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.mark.parametrize("name", [b"g0.engine", b"g0.engine#" + b"0" * 32])
def test_the_holder_of_one_key_gets_nothing_that_is_for_another(folder, context, name):
    """zmq gives an identity to any connection that claims it, before a message is looked at."""
    with (
        Listener("tcp://127.0.0.1:*", config(keys=str(folder))) as listener,
        Link(listener.endpoint, "g0.engine", config(keys=str(folder))) as real,
    ):
        real.send(Commit(version=1))
        until(lambda: listener.peers() == {"g0.engine"})
        thief = context.socket(zmq.DEALER)
        thief.setsockopt(zmq.IDENTITY, name)
        keys.identify(thief, "a0", folder)
        thief.connect(listener.endpoint)
        thief.send(encode(Commit(version=2)))
        until(lambda: listener.refusals.counts["under a name that its key does not own"])
        listener.send("g0.engine", Commit(version=6))
        assert real.receive(LIMIT_S) == Commit(version=6)
        assert not thief.poll(200)


def test_an_address_that_others_can_reach_needs_keys():
    for end in (lambda: Listener("tcp://0.0.0.0:*", config()), lambda: Link("tcp://192.0.2.1:5700", "g0", config())):
        with pytest.raises(BusError, match="needs keys"):
            end()
    assert not keys.needed("tcp://[::1]:5700")
    assert not keys.needed("ipc:///x")
    assert keys.needed("tcp://example.org:5700")


def test_secret_keys_are_for_their_owner_alone(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secret = folder / "g0.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert not list((folder / "allowed").glob("*secret*"))
    secret.chmod(0o644)
    with pytest.raises(BusError, match="may be read by others"):
        Link("tcp://127.0.0.1:1", "g0", config(keys=str(folder)))
    with pytest.raises(BusError, match="can't be read"):
        Link("tcp://127.0.0.1:1", "g7", config(keys=str(folder)))


def test_a_key_that_zeromq_refuses_leaves_no_thread_of_the_listener(folder):
    """40 characters of Z85 that stand for numbers of more than 32 bits."""
    key = "#" * 40
    (folder / "listener.key_secret").write_text(f'curve\n    public-key = "{key}"\n    secret-key = "{key}"\n')
    before = set(threading.enumerate())
    with pytest.raises(BusError, match="can't listen on"):
        Listener("tcp://127.0.0.1:*", config(keys=str(folder)))
    until(lambda: not set(threading.enumerate()) - before)


def test_a_flood_is_refused_and_others_are_heard(monkeypatch, bus_endpoint):
    monkeypatch.setattr(rate_module, "BURST", 50.0)
    monkeypatch.setattr(rate_module, "PER_SECOND", 1.0)
    with Listener(bus_endpoint, config()) as listener, Link(bus_endpoint, "quiet", config()) as quiet:
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.IDENTITY, b"loud")
        raw.connect(bus_endpoint)
        for _ in range(400):
            raw.send(encode(Commit(version=1)))
        until(lambda: listener.refusals.counts["too many messages"] >= 300)
        quiet.send(Commit(version=2))
        until(lambda: (got := listener.receive(LIMIT_S)) is not None and got.peer == "quiet")
        context.destroy(linger=0)


@pytest.mark.parametrize("end", ["listener", "link"])
def test_a_flood_without_end_does_not_keep_an_endpoint_from_sending(bus_endpoint, end):
    """It reads so many and turns to what it has to send."""

    class Flood:
        read = 0

        def recv(self, flags):
            Flood.read += 1
            assert Flood.read < 100_000, "it reads as long as something comes"
            return encode(Heartbeat())

        def recv_multipart(self, flags, copy):
            return [zmq.Frame(b"loud#1"), zmq.Frame(self.recv(flags))]

        def send_multipart(self, parts, flags):
            pass

    flooded = Listener(bus_endpoint, config()) if end == "listener" else Link(bus_endpoint, "g0", config())
    flooded.close()
    flooded._socket = Flood()
    flooded._read_all()
    assert 0 < Flood.read < 100_000


def test_a_listener_hears_all_members_of_a_thousand_generators():
    """Each has an engine and at least one rank; a hundred and twenty-five of eight ranks are as many."""
    rate = Rate()
    members = [f"g{number}.{member}" for number in range(1024) for member in ("engine", "r0", "r1")]
    assert all(rate.allows(member) for member in members * 2)


def test_names_without_end_are_bounded(monkeypatch):
    monkeypatch.setattr(rate_module, "MAX_PEERS", 10)
    rate = Rate()
    assert [rate.allows(f"p{number}") for number in range(12)] == [True] * 10 + [False] * 2


def test_a_reason_is_logged_once_in_a_while(caplog):
    refusals = Refusals("here")
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            refusals.add("p", "no valid message")
            refusals.add(f"p{number}", "too many messages")
    assert refusals.counts == {"no valid message": 1000, "too many messages": 1000}
    assert caplog.text.count("no valid message") == 1
    assert len(caplog.records) <= 260


def test_queues_are_bounded_in_bytes(monkeypatch, bus_endpoint):
    """A reader that does not read holds no more than the limit and one message; the rest waits at the sender."""
    monkeypatch.setattr("inflight.bus.endpoint.MAX_QUEUED_BYTES", 20_000)
    big = GroupAck(group_id="x" * 500)
    with Listener(bus_endpoint, config()) as listener, Link(bus_endpoint, "g0", config()) as link:
        sent, refused, end = 0, 0, time.monotonic() + 3.0
        while sent < 2000 and time.monotonic() < end:
            try:
                link.send(big)
                sent += 1
            except BusError:
                refused += 1
                time.sleep(0.01)
        assert refused, "the sender had to wait"
        assert listener._bytes_in <= 20_000 + 600
        assert all(listener.receive(LIMIT_S) for _ in range(sent)), "and nothing was lost"
        assert listener.receive(0.1) is None
        assert listener._bytes_in == 0


@pytest.mark.parametrize("address", ["0.0.0.0", "host", "::"])
def test_addresses_are_checked(address):
    with pytest.raises(ConfigError, match=r"bus\.address"):
        BusConfig(address=address)
