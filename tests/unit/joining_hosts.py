"""Hosts that join a run, as the launcher sees them (not a test file)."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

from inflight.bus import Link
from inflight.bus.keys import derive_keys
from inflight.config import BusConfig, RunConfig
from inflight.messages import Join, Placed
from inflight.starters.joining import NAME
from inflight.starters.parcel import Parcel, unpacked

LIMIT_S = 30.0
KEY = "j" * 43


def free_ports() -> int:
    """The first of six in a row that nobody listens on."""
    while True:
        first = random.randrange(20000, 60000)
        with suppress(OSError):
            for port in range(first, first + 6):
                socket.create_server(("127.0.0.1", port)).close()
            return first


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
