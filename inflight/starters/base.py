"""What starts a process of a run, and what is known of a process that was started.

A starter is a small thing: `start` takes a Command and returns a Handle at once; everything that takes long or can fail
on the way (a connection, a queue of a scheduler) shows in the handle's `poll`. The launcher (processes.py) polls,
stops, and restarts by calling `start` again with the same Command. A process must end by itself when its launcher is
gone, however that happens: on this host the kernel sees to it, on others a lease (starters/parcel.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

UNREACHABLE = 255
"""Exit code of a process whose host can't be reached (any more), as ssh has it."""


@dataclass(frozen=True)
class Command:
    """A process to start: its name, its kind, what to run and where to log.

    Kinds: `trainer`, `rank` (a further rank of the trainer's), `generator`, `actor`, `evaluator`.
    """

    name: str
    kind: str
    argv: Sequence[str]
    """What a starter of this host runs; others run the module of its kind."""
    log: Path | None
    """A file to append to; None: the output of this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment that it inherits (surroundings.py)."""
    cores: Sequence[int] = ()
    """CPU cores that it may use; empty: all."""
    host: str = ""
    """Where it runs, as its starter names hosts; empty: this host."""
    slot: int = 0
    """How many processes of its kind, that compute on GPUs as well, are on its host before it."""
    configured: bool = True
    """The run is to have it. Others are admitted as hosts join, and are not restarted."""


class Handle(Protocol):
    """A process that was started, or is being started."""

    @property
    def pid(self) -> int | None:
        """The process of this host that it is, or that stands for it; None: there is none."""

    @property
    def address(self) -> str:
        """The host on which it runs, for messages; empty: this one."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; UNREACHABLE when it may still run but can't be reached. None while it
        runs or is being started."""

    def stop(self) -> None:
        """Asks it to end (SIGTERM); returns at once. No effect when it has ended."""

    def kill(self) -> None:
        """Ends it, or gives up its lease; returns at once."""


class Starter(Protocol):
    """Starts processes in one way."""

    def start(self, command: Command) -> Handle:
        """Starts a process; returns at once. Raises OSError when it can't be started."""

    def close(self) -> None:
        """Frees what the starter itself holds; the processes were stopped before."""
