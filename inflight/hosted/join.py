"""`inflight join ADDRESS`: offers this host to a run, and runs the processes that its launcher places here.

Ends with the run, or when the launcher was silent for too long. Within a job of Slurm or torchrun, one such command for
each generator: the task's number on its host decides which GPUs it takes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from inflight.bus import BusError, Link, PeerLost
from inflight.bus.keys import derive_keys
from inflight.config import BusConfig, ConfigError
from inflight.config.network import is_address, joined, parted
from inflight.config.run import SERVICES
from inflight.exits import BAD_INPUT, DONE, GIVEN_UP, heeded_signals, say_why
from inflight.file_path import file_path
from inflight.hosted.folder import private_folder
from inflight.hosted.output import KeptOutput
from inflight.hosted.running import run
from inflight.messages import Finish, Join, Placed, Refused, Vacated
from inflight.messages.hosts import MOST_SLOT
from inflight.models import ModelError
from inflight.starters.base import UNREACHABLE
from inflight.starters.joining import DEAD_AFTER_S, NAME, VARIABLE, checked
from inflight.starters.parcel import KINDS, Parcel, ParcelError, unpacked

LONGEST_WAIT_S = 30 * 86400.0
"""Most seconds to wait for the launcher: a job may be queued for days."""
LONGEST_KEY_FILE = 4096
"""Bytes that are read of a key's file."""
AGAIN_S = 2.0
"""Seconds between two offers."""
LAST_WORDS = 4096
"""Most characters of the reason why a process can't run here."""
LOCAL_NUMBERS = ("SLURM_LOCALID", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Variables with the number of this task among those of its host: of Slurm, torchrun and MPI."""


class Joined:
    """The lease of a process that was placed here: it ends with Finish, or with the launcher. One that takes its place,
    as when the run is resumed, has other keys for the process and does not know of it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._launcher = link.listener
        self.ended = ""
        self.over = False
        """The launcher is gone, or needs this host no more."""

    def wait(self, timeout_s: float) -> bool:
        """See running.Held."""
        try:
            message = self._link.receive(timeout_s)
        except PeerLost as error:
            self.ended = str(error)
            self.over = True
            return False
        self._launcher = self._launcher or self._link.listener
        if isinstance(message, Finish):
            self.ended = message.reason
        elif self._link.listener != self._launcher:
            self.ended = "another launcher has taken the place of the one that placed it"
        return not self.ended


def main(argv: Sequence[str] | None = None) -> int:
    """Returns one of exits.py."""
    parser = argparse.ArgumentParser(prog="inflight join", description=__doc__.split("\n")[0])
    parser.add_argument("address", help="IP address of the launcher, or ADDRESS:PORT of its socket (bus.port + 5)")
    parser.add_argument("--kind", choices=KINDS, default="generator")
    parser.add_argument("--key-file", type=file_path, help=f"file with the join key (default: the variable {VARIABLE})")
    parser.add_argument("--slot", type=int, help="which generator of this host it is (default: the task's number)")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="seconds to wait for the launcher")
    arguments = parser.parse_args(argv)
    for number in heeded_signals():
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if not 0 <= arguments.wait <= LONGEST_WAIT_S:
            raise ConfigError(f"--wait {arguments.wait:g} is not allowed: 0 to {LONGEST_WAIT_S:.0f} seconds")
        key = _key(arguments.key_file, os.environ)
        slot = checked_slot(arguments.slot if arguments.slot is not None else slot_of(os.environ))
        with private_folder() as folder:
            derive_keys(folder, key, NAME)
            bus = BusConfig(dead_after_s=DEAD_AFTER_S, keys=str(folder))
            name = f"{NAME}.{secrets.token_hex(8)}"
            join = Join(number=0, kind=arguments.kind, slot=slot, host=socket.gethostname()[:255])
            endpoint = endpoint_of(arguments.address)
            with Link(endpoint, name, bus, first_contact_s=arguments.wait) as link, KeptOutput() as output:
                try:
                    return offer(link, join, output)
                except PeerLost as error:
                    unheard = "" if link.listener else "; no launcher is there, or it has another join key"
                    return say_why("join", f"{error}{unheard}", GIVEN_UP)
    except (ParcelError, ConfigError, ModelError) as error:
        return say_why("join", error, BAD_INPUT)
    except (BusError, OSError) as error:
        return say_why("join", error, GIVEN_UP)


def offer(link: Link, join: Join, output: KeptOutput) -> int:
    """Runs what the launcher places here, one process after the other, until it needs this host no more (0).

    Raises PeerLost when it is not there (any more), ParcelError, ConfigError, ModelError or OSError for a process that
    can't be started here.
    """
    asked = -AGAIN_S
    while True:
        if time.monotonic() - asked >= AGAIN_S:
            asked = time.monotonic()
            link.send(join)
        message = link.receive(AGAIN_S / 10)
        if isinstance(message, Placed) and message.number == join.number:
            output.forget()
            try:
                code = _placed(link, unpacked(message.parcel))
            except (ParcelError, ConfigError, ModelError, OSError) as error:
                link.send(
                    Vacated(number=join.number, code=UNREACHABLE, output=f"it can't run there: {error}"[:LAST_WORDS])
                )
                raise
            link.send(Vacated(number=join.number, code=code, output=output.last()))
            join = msgspec.structs.replace(join, number=join.number + 1)
            asked = -AGAIN_S
        elif isinstance(message, Finish):
            print(f"inflight join: {message.reason}", flush=True)
            return DONE
        elif isinstance(message, Refused):
            raise ConfigError(f"the launcher refuses this host: {message.reason}")


def _placed(link: Link, parcel: Parcel) -> int:
    """Runs a process; returns its exit code. Raises as `offer` does."""
    print(f"inflight join: {parcel.name} runs here", flush=True)
    lease = Joined(link)
    code = run(parcel, lambda _: lease)
    if lease.over:
        raise PeerLost(lease.ended)
    print(f"inflight join: {parcel.name} ended with code {code}", flush=True)
    return max(-255, min(code, 255))


def endpoint_of(address: str) -> str:
    """The launcher's socket for hosts that join. Raises ConfigError for anything else than an IP address, and a port if
    it is not the default."""
    if is_address(address):
        return f"tcp://{joined(address, BusConfig().port + SERVICES.index('join'))}"
    try:
        return f"tcp://{joined(*parted(address))}"
    except ValueError:
        raise ConfigError(f"{address!r} is not allowed: an IP address, or ADDRESS:PORT") from None


def slot_of(environment: Mapping[str, str]) -> int:
    """The number of this task among those of its host; 0 without a scheduler."""
    for name in LOCAL_NUMBERS:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def checked_slot(slot: int) -> int:
    """Raises ConfigError for a number that no launcher takes."""
    if not 0 <= slot <= MOST_SLOT:
        raise ConfigError(f"--slot {slot} is not allowed: 0 to {MOST_SLOT}")
    return slot


def _key(file: Path | None, environment: Mapping[str, str]) -> str:
    """Raises ConfigError for what is no key, OSError for a file that can't be read."""
    if file is not None:
        with file.open("rb") as opened:
            data = opened.read(LONGEST_KEY_FILE)
        return checked(data.decode("utf-8-sig", "surrogateescape").strip(), str(file))
    return checked(environment.get(VARIABLE, ""), VARIABLE)
