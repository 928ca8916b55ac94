"""Which processes of a run are restarted when they fail, when, and when the launcher gives up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from inflight.config import RunConfig
from inflight.config.hosts import ANYWHERE
from inflight.exits import BAD_INPUT
from inflight.processes import Ended
from inflight.starters.base import UNREACHABLE, Command

KINDS = ("generator", "actor", "evaluator")
"""A trainer is not restarted: its state is in its checkpoint, which `resume=true` resumes from."""


RETRY_AT_MOST_S = 30.0
"""The longest delay before a host that could not be reached is tried again."""


@dataclass
class _RestartRecord:
    failures: int = 0
    worked: bool = False
    """Whether it has ever sent a status: a process that never did would fail again in the same way."""
    works: bool = False
    """Whether it has sent one since it was last started."""
    unreachable: int = 0
    """How often in a row its host could not be reached."""
    tokens: float = 0.0
    """Tokens that it contributed and that the trainer's buffer accepted, since its last failure."""


class Restarts:
    """Decides on restarts; the launcher carries them out. The delay doubles with each failure of a process.

    The failure count is reset by work: by as many accepted tokens as one step has at most, divided among the processes
    of a kind.
    """

    def __init__(self, config: RunConfig) -> None:
        self._limit = config.launch.restarts
        self._delay_s = config.launch.restart_delay_s
        step = config.trainer.groups_per_step * config.rollout.group_size * config.rollout.max_tokens
        self._enough = {"actor": step / config.rollout.actors, "generator": step / config.generator.count}
        self._records: dict[str, _RestartRecord] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._due: dict[str, tuple[float, Command]] = {}
        self._blamed: list[str] = []

    def heard(self, name: str, values: Mapping[str, object]) -> None:
        """Takes a status message. Tokens that an actor reports as accepted count for it and for the generators that
        sampled them."""
        record = self._of(name)
        record.worked = record.works = True
        record.unreachable = 0
        for key, value in values.items():
            word, _, generator = key.partition(".")
            if word == "accepted" and isinstance(value, int | float):
                before = self._seen.get((name, key), 0.0)
                self._seen[name, key] = value
                self._of(generator or name).tokens += value - before if value >= before else value  # it was restarted

    def ended(self, name: str) -> None:
        """A process does not work any more, for whatever reason."""
        self._of(name).works = False

    def failed(self, ended: Ended) -> str | None:
        """Plans the restart of a process that failed and returns a line about it; None: the process is given up."""
        command = ended.command
        record = self._of(command.name)
        if command.host and ended.code == UNREACHABLE and (record.worked or command.host == ANYWHERE):
            return self._reach_again(record, command)
        if command.kind in self._enough and record.tokens >= self._enough[command.kind]:
            record.failures = 0
        record.failures += 1
        record.tokens = 0.0
        if self._is_the_hosts(command):
            return self._elsewhere(record, ended)
        hopeless = command.kind not in KINDS or ended.code == BAD_INPUT or not (record.worked or _may_be_back(ended))
        if hopeless or record.failures > self._limit:
            return None
        return f"{ended}; {self._planned(record, command)} ({record.failures} of {self._limit}); its log: {command.log}"

    def _planned(self, record: _RestartRecord, command: Command) -> str:
        delay = self._delay_s * 2.0 ** (record.failures - 1)
        self._due[command.name] = (time.monotonic() + delay, command)
        return f"it is restarted in {delay:g} s"

    def _is_the_hosts(self, command: Command) -> bool:
        """Whether a failure is that of a host which has joined, and not of the run: another process of the kind
        works."""
        working = (name for name, record in self._records.items() if record.works and name != command.name)
        return command.host == ANYWHERE and any(_is_of(name, command.kind) for name in working)

    def _elsewhere(self, record: _RestartRecord, ended: Ended) -> str:
        """A host that joins and can't run a process must not end the run: after `launch.restarts` failures the
        host is refused, and the process waits for another one."""
        said = f"({record.failures} of {self._limit})"
        if record.failures > self._limit:
            record.failures = 1
            self._blamed.append(ended.command.name)
            said = "on another host; its own is refused"
        return f"{ended}; {self._planned(record, ended.command)} {said}; its log: {ended.command.log}"

    def blamed(self) -> list[str]:
        """Processes whose hosts are to be refused, since the last call."""
        blamed, self._blamed = self._blamed, []
        return blamed

    def _reach_again(self, record: _RestartRecord, command: Command) -> str:
        """A host that is gone is no failure of its process, and has no limit of its own: as long as other generators
        work, the run continues; without any it ends after `publish.join_timeout_s`."""
        record.unreachable += 1
        delay = min(self._delay_s * 2.0 ** min(record.unreachable - 1, 10), RETRY_AT_MOST_S)
        self._due[command.name] = (time.monotonic() + delay, command)
        if command.host == ANYWHERE:
            return f"the host of {command.name} is gone, another one gets it in {delay:g} s; its log: {command.log}"
        return f"{command.host} can't be reached, {command.name} is restarted in {delay:g} s; its log: {command.log}"

    def due(self) -> list[Command]:
        """The commands that are to be started now."""
        now = time.monotonic()
        ready = [name for name, (at, _) in self._due.items() if at <= now]
        return [self._due.pop(name)[1] for name in ready]

    def given_up(self, name: str) -> str:
        """A remark on how often it was restarted, for the last line about it; empty when it was not."""
        failures = self._of(name).failures
        return f", after {failures - 1} restarts (launch.restarts={self._limit})" if failures > 1 else ""

    def _of(self, name: str) -> _RestartRecord:
        return self._records.setdefault(name, _RestartRecord())


def _is_of(name: str, kind: str) -> bool:
    """Whether a process is a generator (`g0`) or an actor (`a0`); the launcher numbers those that join on."""
    return name[0] == kind[0] and name[1:].isdecimal()


def _may_be_back(ended: Ended) -> bool:
    """Whether its host could not be reached: sshd, for example, drops some of many connections that come at once."""
    return bool(ended.command.host) and ended.code == UNREACHABLE
