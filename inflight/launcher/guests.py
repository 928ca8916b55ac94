"""Generators and actors beyond the configured ones, on hosts that join: which are admitted, and what they get.

Each gets a name that no process of this start of the run had, with a key of its own. It is never restarted: its host
offers itself again, and gets the next name. When it leaves, for whatever reason, its key is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from inflight.bus import add_key, remove_key
from inflight.config import RunConfig
from inflight.exits import DONE
from inflight.launcher.commands import joining_command
from inflight.processes import Ended
from inflight.starters.base import UNREACHABLE, Command
from inflight.starters.parcel import KINDS


class Offers(Protocol):
    """Hosts that have offered to run a process."""

    def unserved(self, kind: str) -> int:
        """How many have offered to run one of a kind and got none, beyond those for which one waits already."""


class Guests:
    """Admits them up to `hosts.most_generators` and `hosts.most_actors`."""

    def __init__(self, config: RunConfig, offers: Offers | None) -> None:
        """`offers`: None where no hosts join."""
        self._config = config
        self._offers = offers
        self._present: dict[str, set[str]] = {kind: set() for kind in KINDS}
        self._next = {kind: config.count_of(kind) for kind in KINDS}
        self._over = False
        """The trainer needs no more work: processes end by themselves."""

    def of(self, kinds: Sequence[str]) -> list[str]:
        """Names of those of some kinds that are there."""
        return sorted(name for kind in kinds for name in self._present.get(kind, ()))

    def due(self) -> list[Command]:
        """Those that are to be started now. Raises OSError when a key can't be written."""
        if self._offers is None or self._over:
            return []
        return [
            self._admitted(kind)
            for kind, present in self._present.items()
            for _ in range(min(self._offers.unserved(kind), self._room(kind, len(present))))
        ]

    def _room(self, kind: str, present: int) -> int:
        return self._config.most_of(kind) - self._config.count_of(kind) - present

    def _admitted(self, kind: str) -> Command:
        command = joining_command(self._config, kind, self._next[kind])
        self._next[kind] += 1
        self._present[kind].add(command.name)
        add_key(Path(self._config.bus.keys), command.name)
        return command

    def left(self, ended: Ended) -> str | None:
        """A line about one that has ended; None: the process is none of them."""
        name = ended.command.name
        present = self._present.get(ended.command.kind, set())
        if name not in present:
            return None
        present.remove(name)
        remove_key(Path(self._config.bus.keys), name)
        self._over = self._over or ended.code == DONE
        how = "with its host" if ended.code == UNREACHABLE else f"with code {ended.code}"
        return f"{name} has left the run, {how}; its log: {ended.command.log}"
