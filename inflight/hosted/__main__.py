"""`python -m inflight.hosted`, with a parcel on standard input: one process of a run whose launcher is elsewhere."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from inflight.config import ConfigError
from inflight.exits import BAD_INPUT, GIVEN_UP, say_why
from inflight.hosted.running import run
from inflight.models import ModelError
from inflight.processes import leave_with
from inflight.starters.parcel import Lease, ParcelError, received


def main() -> int:
    """Returns the exit code of the process, or one of exits.py when it could not be started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        parcel = received(sys.stdin.fileno())
        return run(parcel, lambda limit_s: Lease(sys.stdin.fileno(), limit_s))
    except (ParcelError, ConfigError, ModelError) as error:
        return say_why("hosted", error, BAD_INPUT)
    except OSError as error:
        return say_why("hosted", error, GIVEN_UP)


def _end(number: int, frame: FrameType | None) -> None:
    """Unwinds the main thread, which ends the process and removes its folder."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    leave_with(main)  # a download that its lease has outlived still has threads
