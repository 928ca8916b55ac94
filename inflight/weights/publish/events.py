"""The outcome of each version at each generator, in a log that is read by cursor."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

PHASES = ("transfer_s", "build_s", "ready_s", "commit_s", "gap_s")
"""The durations of a Swap."""


@dataclass(frozen=True)
class Swap:
    """A version that a generator has committed. Times are in seconds."""

    generator: str
    version: int
    transfer_s: float
    """Slowest rank: arrival of Prepare to all bytes verified."""
    build_s: float
    """Slowest rank: bytes to kernel-ready shadow."""
    ready_s: float
    """Packing queued to the last rank's Ready: on CUDA the packing, the publisher's checksums, transfer and build."""
    commit_s: float
    """Commit sent to the last rank's RankSwapped received, or to Committed."""
    gap_s: float
    """The longest stall of a rank's step loop."""
    running: int | None
    """Sequences that were unfinished at the swap; None: the generator was lost, or its answer, before it said so."""
    time: float = field(default_factory=time.time, compare=False)
    """Unix time at which the publisher heard of it."""
    pinned_s: float = 0.0
    """From the last rank's Ready to the Commit: the rest of the check for NaN and Inf, and of a pin of the version
    before."""


@dataclass(frozen=True)
class Failure:
    """A version that a generator did not get (or may have half: phase `commit`)."""

    generator: str
    version: int
    phase: str
    """`absent` when it was not sent, `finite` when it holds NaN or Inf or the check for them took too long, `fit` when
    the engine's model does not fit the manifest, else that of messages.Failed."""
    reason: str


@dataclass(frozen=True)
class Superseded:
    """A version that was not sent to a generator, or not to its end, because there was a newer one."""

    generator: str
    version: int
    reason: str


@dataclass(frozen=True)
class Left:
    """A version that a generator did not get because it was asked to end, for a stop or a restart."""

    generator: str
    version: int
    reason: str


Event = Swap | Failure | Superseded | Left
"""The outcome of a version at a generator."""


class EventLog:
    """Events in order, with totals that are updated as events are added: reading costs nothing for events read
    before."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._swaps = self._swaps_with_running = self._failures = self._superseded = 0
        self._largest = dict.fromkeys(PHASES, 0.0)

    def append(self, event: Event) -> None:
        """Adds the latest event."""
        self._events.append(event)
        match event:
            case Swap():
                self._swaps += 1
                self._swaps_with_running += bool(event.running)
                self._largest = {name: max(largest, getattr(event, name)) for name, largest in self._largest.items()}
            case Failure():
                self._failures += 1
            case Superseded():
                self._superseded += 1

    def since(self, cursor: int) -> list[Event]:
        """The events from number `cursor` on, counted from 0; the next cursor is `cursor` plus their count."""
        return self._events[cursor:]

    def totals(self) -> dict[str, float | int]:
        """Counts, and the largest of each duration so far in seconds."""
        return {
            "swaps": self._swaps,
            "swaps_with_running": self._swaps_with_running,
            "failures": self._failures,
            "superseded": self._superseded,
            **{f"max_{name}": largest for name, largest in self._largest.items()},
        }
