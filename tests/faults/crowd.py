"""Hosts that join a run, several in one process: `python crowd.py ADDRESS:PORT FIRST COUNT` (not a test file).

Each is a real `inflight join`, with a connection and keys of its own, but that it runs what is placed on it in a
thread: a generator without an engine, over real sockets, with the keys and the configuration of its parcel. Hosts with
a number of 3, 13, … end their first generator when it holds version 2, those of 7, 17, … leave with it at version 3.
At a line on standard input, each says what its generator holds: a line of JSON, {name: [version, digest of weights]}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
from fake_generator import FakeGenerator

from inflight.bus import Link
from inflight.bus.keys import derive_keys
from inflight.config import BusConfig
from inflight.exits import STOPPED
from inflight.hosted import join
from inflight.hosted.folder import unpacked_folder
from inflight.hosted.output import KeptOutput
from inflight.hosted.running import Held
from inflight.messages import Join
from inflight.starters.joining import DEAD_AFTER_S, NAME, VARIABLE
from inflight.starters.parcel import Parcel
from inflight.weights.transport import make_receiver
from inflight.weights.transport.place import place_of

WAIT_S = 300.0
here = threading.local()
"""The host of a thread."""


class LeavesError(Exception):
    """The host leaves, without a word to the launcher but its goodbye."""


class Host:
    """One that joins; runs in a thread of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ran = 0
        self.generator: FakeGenerator | None = None

    def run(self, address: str, output: KeptOutput) -> None:
        here.host = self
        with tempfile.TemporaryDirectory() as folder:
            derive_keys(Path(folder), os.environ[VARIABLE], NAME)
            bus = BusConfig(dead_after_s=DEAD_AFTER_S, keys=folder)
            name = f"{NAME}.{self.number}"
            try:
                with Link(join.endpoint_of(address), name, bus, first_contact_s=WAIT_S) as link:
                    join.offer(link, Join(number=0, kind="generator", slot=0, host=f"host{self.number}"), output)
            except LeavesError:
                self.generator = None

    def generate(self, parcel: Parcel, lease_of: Callable[[float], Held]) -> int:
        """In place of running.run: returns the exit code of the process that it stands for."""
        self.ran += 1
        with unpacked_folder(parcel) as config:
            lease = lease_of(config.hosts.lease_s)
            self.generator = FakeGenerator(
                config.endpoint("weights"),
                parcel.name,
                bus=config.bus,
                place=place_of(torch.device("cpu")),
                url=f"http://127.0.0.1:{10000 + self.number}",
                connect=lambda welcome: make_receiver(welcome, config.network),
            ).start()
            try:
                while lease.wait(0.1):
                    version = self.generator.version or 0
                    if self.number % 10 == 3 and self.ran == 1 and version >= 2:
                        return STOPPED
                    if self.number % 10 == 7 and version >= 3:
                        raise LeavesError
            finally:
                self.generator.close()
        return STOPPED

    def holds(self) -> dict[str, list[object]]:
        if self.generator is None:
            return {}
        live = self.generator.shadows[0].live
        digest = hashlib.sha256(b"".join(live[name].numpy().tobytes() for name in sorted(live)))
        return {self.generator.name: [self.generator.version, digest.hexdigest()]}


def generate(parcel: Parcel, lease_of: Callable[[float], Held]) -> int:
    return here.host.generate(parcel, lease_of)


def main(address: str, first: int, count: int) -> None:
    os.umask(0o077)  # threads that set it for their keys, and set it back, must not do so for each other
    join.run = generate
    hosts = [Host(first + number) for number in range(count)]
    answers = os.fdopen(os.dup(1), "w")
    with KeptOutput() as output:
        for host in hosts:
            threading.Thread(target=host.run, args=(address, output), daemon=True).start()
            time.sleep(0.2)  # one after the other
        for _ in sys.stdin:
            held: dict[str, list[object]] = {}
            for host in hosts:
                held |= host.holds()
            print(json.dumps(held), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)
