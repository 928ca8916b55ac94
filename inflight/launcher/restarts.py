"""Which processes of a run are started again when they fail, when, and when that is given up."""

from __future__ import annotations

import time
from dataclasses import dataclass

from inflight.config import LaunchConfig
from inflight.exits import BAD_INPUT
from inflight.processes import Command, Ended

KINDS = ("generator", "actor")
"""A trainer is not started again: what it held is in its checkpoint, and `resume=true` goes on from there."""
FORGET_AFTER_S = 600.0
"""A process that worked for so long has its failures forgiven."""


@dataclass
class _Record:
    failures: int = 0
    worked: bool = False
    """Whether it was ever heard of: one that never was would not do better the next time."""
    up: float | None = None
    """When it was first heard of since its last start."""


class Restarts:
    """Decides; the launcher acts. Delays double from one failure of a process to its next."""

    def __init__(self, config: LaunchConfig) -> None:
        self._limit, self._delay_s = config.restarts, config.restart_delay_s
        self._records: dict[str, _Record] = {}
        self._due: dict[str, tuple[float, Command]] = {}

    def started(self, command: Command) -> None:
        """A process was started."""
        self._of(command.name).up = None

    def heard(self, name: str) -> None:
        """A process reports that it works."""
        record = self._of(name)
        record.worked = True
        if record.up is None:
            record.up = time.monotonic()

    def failed(self, ended: Ended) -> str | None:
        """Plans the next start of a process that failed and says so in one line; None when it is given up."""
        record, command = self._of(ended.command.name), ended.command
        if record.up is not None and time.monotonic() - record.up > FORGET_AFTER_S:
            record.failures = 0
        record.failures += 1
        hopeless = command.kind not in KINDS or ended.code == BAD_INPUT or not record.worked
        if hopeless or record.failures > self._limit:
            return None
        delay = self._delay_s * 2.0 ** (record.failures - 1)
        self._due[command.name] = (time.monotonic() + delay, command)
        return (
            f"{ended}; it is started again in {delay:g} s ({record.failures} of {self._limit}); its log: {command.log}"
        )

    def due(self) -> list[Command]:
        """What is to be started now."""
        now = time.monotonic()
        ready = [name for name, (at, _) in self._due.items() if at <= now]
        return [self._due.pop(name)[1] for name in ready]

    def given_up(self, name: str) -> str:
        """How often it was started again, for the last line about it; empty when it was not."""
        failures = self._of(name).failures
        return f", after {failures - 1} restarts (launch.restarts={self._limit})" if failures > 1 else ""

    def _of(self, name: str) -> _Record:
        return self._records.setdefault(name, _Record())
