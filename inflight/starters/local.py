"""Starts processes on this host.

Each gets a session of its own, so that Ctrl-C in a terminal reaches the launcher alone, and the kernel signals it to
stop when the launcher dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from inflight.lifeline import end_with
from inflight.starters.base import Command
from inflight.surroundings import inherited


class LocalHandle:
    """A child of this process."""

    address = ""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.pid: int | None = child.pid

    def poll(self) -> int | None:
        """See Handle."""
        return self._child.poll()

    def stop(self) -> None:
        """See Handle."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See Handle."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()


class LocalStarter:
    """Must be used from a thread that lives as long as its processes: the kernel watches that thread."""

    def __init__(self, keep_open: Sequence[int] = ()) -> None:
        """`keep_open` are file descriptors that the processes inherit."""
        self._keep_open = tuple(keep_open)

    def start(self, command: Command) -> LocalHandle:
        """Starts a process with stdout and stderr appended to its log. Raises OSError when that fails."""
        inherits = inherited(os.environ, command.kind) | dict(command.environment)
        return LocalHandle(spawned(command, command.argv, inherits, subprocess.DEVNULL, self._keep_open))

    def close(self) -> None:
        """See Starter."""


def spawned(
    command: Command, argv: Sequence[str], environment: dict[str, str], stdin: int, keep_open: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A child that runs `argv` for a command. Raises OSError when it can't be started."""
    launcher = os.getpid()

    def prepare() -> None:  # in the child, between fork and exec
        end_with(launcher, signal.SIGTERM)
        if command.cores:
            os.sched_setaffinity(0, command.cores)

    with contextlib.ExitStack() as stack:
        output = None
        if command.log is not None:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(command.log.open("ab"))
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            env=environment,
            start_new_session=True,
            pass_fds=tuple(keep_open),
            preexec_fn=prepare,
        )
