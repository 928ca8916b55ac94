"""Hosts that join a run, as the launcher sees them (not a test file)."""

from __future__ import annotations

import functools
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fake_generator import eventually
from run_folders import written_run

from inflight.bus import Link
from inflight.bus.keys import derive_keys
from inflight.config import BusConfig, RunConfig
from inflight.launcher.compose import compose
from inflight.messages import AnyMessage, Join, Placed
from inflight.starters.joining import NAME, VARIABLE, JoinStarter
from inflight.starters.parcel import Parcel, unpacked

LIMIT_S = 30.0
KEY = "j" * 43


def free_ports() -> int:
    """The first of six in a row that nobody listens on; the system gives none of them to a socket without a port."""
    while True:
        first = random.randrange(20000, 32000)
        with suppress(OSError):
            for port in range(first, first + 6):
                socket.create_server(("127.0.0.1", port)).close()
            return first


@functools.cache
def composed(*overrides: str) -> RunConfig:
    """A run whose processes are placed on hosts that join."""
    return compose("tiny", ["run_dir=/nowhere", "network.bind=127.0.0.1", "hosts.starter=join", *overrides])


def joined_run(folder: Path, *overrides: str) -> RunConfig:
    """The same, with its folder written."""
    return written_run(composed(*overrides), folder, port=free_ports(), heartbeat_s=0.1)


@contextmanager
def accepting(run: RunConfig) -> Iterator[JoinStarter]:
    """The launcher's side, with the join key."""
    made = JoinStarter(run, {VARIABLE: KEY})
    try:
        yield made
    finally:
        made.close()


def connected(run: RunConfig, folder: Path, name: str, key: str = KEY) -> Link:
    """A host with the join key, or another one."""
    own = folder / f"of-{name}"
    derive_keys(own, key, NAME)
    return Link(run.endpoint("join"), name, BusConfig(heartbeat_s=0.1, keys=str(own)), first_contact_s=LIMIT_S)


def placed(link: Link, number: int = 0, slot: int = 0, kind: str = "generator") -> Parcel:
    link.send(Join(number=number, kind=kind, slot=slot, host=f"node{slot}"))
    message = link.receive(LIMIT_S)
    assert isinstance(message, Placed)
    assert message.number == number
    return unpacked(message.parcel)


def answer(link: Link, number: int) -> AnyMessage:
    """To an offer, which is repeated as a host does it; not what answers a repetition of an earlier one."""
    found: list[AnyMessage] = []

    def answered() -> bool:
        link.send(Join(number=number, kind="generator", slot=0, host="node"))
        message = link.receive(0.2)
        if message is not None and not (isinstance(message, Placed) and message.number != number):
            found.append(message)
        return bool(found)

    eventually(answered, "an answer", timeout_s=LIMIT_S)
    return found[0]
