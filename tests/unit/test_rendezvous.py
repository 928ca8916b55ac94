"""The store between a sender and its ranks: who hosts it and dies is noticed, by a question and not by a value."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
from transports import stop, store_elsewhere

from inflight.weights.transport.base import TransportError
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.timeout import within


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], KeyValueStore]]:
    """A process with a store, and another end of it."""
    with store_elsewhere() as (process, address):
        yield process, KeyValueStore(address, 1.0)


def test_a_host_that_lives_is_confirmed(host: tuple[subprocess.Popen[str], KeyValueStore]) -> None:
    _, store = host
    store.confirm("the trainer", "receive")
    store.put("key", b"value")
    store.confirm("the trainer", "receive")
    assert store.take("key", "the trainer", "receive") == b"value"


def test_a_host_that_died_is_not_though_a_value_still_goes_out(
    host: tuple[subprocess.Popen[str], KeyValueStore],
) -> None:
    process, store = host
    process.kill()
    process.wait(20)
    store.put("done", b"")  # into a socket without a reader
    with pytest.raises(TransportError, match="receive: the trainer is gone"):
        store.confirm("the trainer", "receive")


def test_a_reply_is_sent_only_to_a_live_host(host: tuple[subprocess.Popen[str], KeyValueStore]) -> None:
    process, store = host
    store.reply("done", b"value", "the trainer", "receive")
    assert store.take("done", "the rank", "send") == b"value"
    process.kill()
    process.wait(20)
    with pytest.raises(TransportError, match="receive: the trainer is gone"):
        store.reply("done", b"", "the trainer", "receive")


def test_a_value_that_was_taken_with_drop_is_deleted(host: tuple[subprocess.Popen[str], KeyValueStore]) -> None:
    _, store = host
    store.put("done", b"value")
    assert store.take("done", "the rank", "send") == b"value"
    assert store.take("done", "the rank", "send", drop=True) == b"value"
    with pytest.raises(TransportError, match="send: the rank did not answer"):
        store.take("done", "the rank", "send")


@pytest.mark.parametrize("asking", ["confirm", "take", "put", "reply", "drop", "join"])
def test_a_host_that_is_stopped_is_waited_for_no_longer_than_the_bound(
    host: tuple[subprocess.Popen[str], KeyValueStore], asking: str
) -> None:
    """torch's client of the store would wait until the host continues."""
    process, store = host
    store.put("sent", b"1")
    stop(process)
    ask = {
        "confirm": lambda: store.confirm("the trainer", "receive"),
        "take": lambda: store.take("offer", "the trainer", "receive"),
        "put": lambda: [store.put("done", b"x" * (1 << 20)) for _ in range(20)],
        "reply": lambda: store.reply("done", b"", "the trainer", "receive"),
        "drop": lambda: store.drop("sent"),
        "join": lambda: KeyValueStore(store.address, 1.0),
    }[asking]
    with pytest.raises(TransportError, match=r"did not answer within 1(\.5)? s|no rendezvous .*: no answer within 1 s"):
        ask()
    process.send_signal(signal.SIGCONT)
    KeyValueStore(store.address, 20.0).confirm("the trainer", "receive")


def test_a_host_that_is_gone_is_not_waited_for(host: tuple[subprocess.Popen[str], KeyValueStore]) -> None:
    """Its rank is needed by the trainer that comes next; torch's client would try again until the bound."""
    process, store = host
    process.kill()
    process.wait(20)
    with pytest.raises(TransportError, match=r"connect: no rendezvous at .*: \[Errno 111\]"):
        KeyValueStore(store.address, 30.0)


def test_a_store_that_is_shut_refuses_strangers_and_keeps_its_ranks() -> None:
    hosting = KeyValueStore("", 20.0)
    rank = KeyValueStore(hosting.address, 20.0)
    hosting.shut()
    with pytest.raises(TransportError, match=r"connect: no rendezvous at .*: \[Errno 111\]"):
        KeyValueStore(hosting.address, 20.0)
    rank.reply("done", b"value", "the trainer", "receive")
    assert hosting.take("done", "the rank", "send") == b"value"
    hosting.shut()
    rank.shut()
    rank.confirm("the trainer", "receive")


def test_a_call_that_is_late_is_abandoned() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, lambda: (threading.Event().wait(5), ended.set()))
    assert not ended.is_set(), "it was waited for"
    assert ended.wait(20), "it continues"
