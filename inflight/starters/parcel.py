"""What a process on another host needs, in one piece, and the lease by which it ends with its launcher.

The parcel goes through a pipe that no other process reads (the standard input of ssh) or over a socket with CURVE
keys: it holds the secret key of this process and the API key of the run. Its receiver keeps both in a folder of its
own, in memory where that is possible, and removes that folder at the end. Nothing of the run folder is shared.

On the pipe, a parcel is its length as eight hexadecimal digits and its JSON. Each byte after it renews the lease; the
end of the input ends it.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from inflight import __version__
from inflight.config import CONFIG_FILE, ConfigError, RunConfig
from inflight.starters.base import Command

MAX_BYTES = 1 << 20
ARRIVES_WITHIN_S = 60.0
RENEWAL = b"."
MODULE = "inflight.hosted"
"""What receives a parcel on the other host."""
_LENGTH = 8
KINDS = ("generator", "actor")
"""Kinds of processes that may run on another host than the launcher."""
Secret = Annotated[str, Meta(max_length=4096)]


class Parcel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module. Refused by another release of inflight, whose configuration may mean something else."""

    inflight: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(pattern="^[ag][0-9]{1,6}$")]
    kind: Annotated[str, Meta(pattern="^(generator|actor)$")]
    slot: Annotated[int, Meta(ge=0, le=1024)]
    run: Annotated[str, Meta(max_length=4096)]
    """The run's folder on the launcher's host."""
    trainer: Annotated[str, Meta(max_length=64)]
    """IP address at which the trainer is reached."""
    config: Annotated[str, Meta(max_length=1 << 19)]
    """The run's configuration, in YAML."""
    keys: Annotated[dict[Annotated[str, Meta(pattern=r"^[a-z0-9]{1,16}\.key(_secret)?$")], Secret], Meta(max_length=4)]
    """File name → content: the key pair of this process, and the public key of the listeners."""
    api_key: Secret
    environment: Annotated[dict[str, str], Meta(max_length=64)]


class ParcelError(ValueError):
    """A parcel that is not used; the text is one line."""


def parcel_of(config: RunConfig, command: Command) -> Parcel:
    """For a process of a run whose folder is here. Raises ConfigError for a kind that has to run here, OSError when a
    key can't be read."""
    if command.kind not in KINDS:
        raise ConfigError(f"{command.name} can't run on another host: only {' and '.join(KINDS)} can")
    folder = Path(config.bus.keys)
    files = ("listener.key", f"{command.name}.key_secret")
    return Parcel(
        inflight=__version__,
        name=command.name,
        kind=command.kind,
        slot=command.slot,
        run=config.run_dir,
        trainer=config.bus.address or config.network.reached,
        config=(config.path / CONFIG_FILE).read_text(),
        keys={name: (folder / name).read_text() for name in files},
        api_key=config.api_key(),
        environment=dict(command.environment),
    )


def body_of(parcel: Parcel) -> bytes:
    """The JSON of a parcel."""
    return msgspec.json.encode(parcel)


def packed(parcel: Parcel) -> bytes:
    """As it goes through a pipe."""
    body = body_of(parcel)
    return f"{len(body):0{_LENGTH}x}".encode() + body


def unpacked(body: bytes) -> Parcel:
    """Raises ParcelError for anything but a parcel of this release."""
    try:
        parcel = msgspec.json.decode(body, type=Parcel)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ParcelError(f"no parcel of a launcher of inflight {__version__}: {error}") from None
    if parcel.inflight != __version__:
        raise ParcelError(f"this host has inflight {__version__}, the launcher's {parcel.inflight}")
    return parcel


def received(pipe: int, within_s: float = ARRIVES_WITHIN_S) -> Parcel:
    """Reads a parcel. Raises ParcelError when none comes in time, the input ends before, or it is none."""
    deadline = time.monotonic() + within_s
    head = _exactly(pipe, _LENGTH, deadline)
    try:
        length = int(head, 16)
    except ValueError:
        raise ParcelError(f"no parcel of a launcher: it begins with {head!r}") from None
    if not 0 < length <= MAX_BYTES:
        raise ParcelError(f"a parcel of {length} bytes, at most {MAX_BYTES} are allowed")
    return unpacked(_exactly(pipe, length, deadline))


def _exactly(pipe: int, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ParcelError(f"no parcel came in time, {len(data)} of {length} bytes did")
        if not (more := os.read(pipe, length - len(data))):
            raise ParcelError(f"the input ended before the parcel did, after {len(data)} of {length} bytes")
        data += more
    return data


class Lease:
    """Held by the process on the other host: valid until the pipe ends or is silent for `limit_s`."""

    def __init__(self, pipe: int, limit_s: float) -> None:
        self._pipe = pipe
        self._limit_s = limit_s
        self._renewed = time.monotonic()
        self.ended = ""
        """Why it is over; empty while it is valid."""

    def wait(self, timeout_s: float) -> bool:
        """Takes renewals for up to `timeout_s`. False when it is over."""
        if not self.ended and select.select([self._pipe], [], [], timeout_s)[0]:
            if os.read(self._pipe, 4096):
                self._renewed = time.monotonic()
            else:
                self.ended = "the launcher has ended it"
        if not self.ended and time.monotonic() - self._renewed > self._limit_s:
            self.ended = f"no sign of the launcher for {self._limit_s:g} s (hosts.lease_s)"
        return not self.ended
