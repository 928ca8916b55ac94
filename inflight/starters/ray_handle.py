"""Ray's starter on the launcher's host: the handle of a process that runs beside a Ray actor on another node.

`poll` calls the node from time to time, which renews the lease there, and takes the process's output and exit code from
the answers. Imports no Ray: NodeCalls stands for its remote calls.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Protocol

from inflight.exits import STOPPED
from inflight.starters.base import UNREACHABLE, Command

EVERY_S = 0.25
"""Seconds from one answer to the next question."""
CLOSES_WITHIN_S = 15.0
"""Most seconds of one poll."""


class NodeGone(Exception):
    """The object on the node has ended, or could not be made; the text is one line."""


class NodeCalls(Protocol):
    """Remote calls of a RayNodeProcess on another node (ray_node.py). None of them waits."""

    def ask(self) -> None:
        """Calls `exchange`."""

    def answer(self) -> tuple[bytes, int | None] | None:
        """What the last call of `exchange` returned; None: nothing yet. Raises NodeGone, or ConnectionError when the
        node may answer the next call."""

    def stop(self) -> None:
        """Calls `stop`, before any later `ask`."""

    def end(self) -> None:
        """Ends the object, and what the node reserves for it."""


class RayHandle:
    """See Handle: a process that waits for its node, runs there or has ended."""

    pid: int | None = None

    def __init__(self, command: Command, calls: NodeCalls, lease_s: float) -> None:
        self.address = command.host
        self._command = command
        self._calls = calls
        self._lease_s = lease_s
        self._answered: float | None = None
        """When the node has last answered; None: the process still waits for its node."""
        self._next = 0.0
        self._code: int | None = None
        self._lock = threading.Lock()
        """Two threads poll: the launcher's, and RayLeases."""
        calls.ask()

    def poll(self) -> int | None:
        """See Handle. UNREACHABLE when the node is gone or has not answered for as long as the lease lasts."""
        with self._lock:
            now = time.monotonic()
            if self._code is None and now >= self._next:
                self._take(now)
            return self._code

    def stop(self) -> None:
        """See Handle."""
        with self._lock:
            if self._code is not None:
                return
            if self._answered is None:
                self._end(STOPPED)
            else:
                self._calls.stop()

    def kill(self) -> None:
        """See Handle: what runs on the node ends by its lease, after its grace."""
        with self._lock:
            if self._code is None:
                self._end(STOPPED)

    def _take(self, now: float) -> None:
        try:
            answer = self._calls.answer()
        except NodeGone as error:
            self._lost(str(error))
        except ConnectionError:
            if not self._is_silent(now):
                self._ask_again(now)
        else:
            if answer is None:
                self._is_silent(now)
                return
            output, code = answer
            self._answered = now
            self._write(output)
            if code is None:
                self._ask_again(now)
            else:
                self._end(code)

    def _ask_again(self, now: float) -> None:
        self._next = now + EVERY_S
        self._calls.ask()

    def _is_silent(self, now: float) -> bool:
        silent = self._answered is not None and now - self._answered > self._lease_s
        if silent:
            self._lost(f"no answer for {self._lease_s:g} s (hosts.lease_s)")
        return silent

    def _lost(self, why: str) -> None:
        self._write(f"inflight launch: {self._command.name} is lost: {why}\n".encode())
        self._end(UNREACHABLE)

    def _end(self, code: int) -> None:
        self._code = code
        self._calls.end()

    def _write(self, output: bytes) -> None:
        if self._command.log is None:
            sys.stdout.write(output.decode(errors="replace"))
        elif output:
            with contextlib.suppress(OSError):  # a full disk ends the run elsewhere, not the lease here
                self._command.log.parent.mkdir(parents=True, exist_ok=True)
                with self._command.log.open("ab") as log:
                    log.write(output)


class RayLeases:
    """A thread that polls handles, so that processes on other nodes live while the launcher's own thread is blocked, as
    by a terminal that takes no output."""

    def __init__(self) -> None:
        self._handles: list[RayHandle] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def add(self, handle: RayHandle) -> RayHandle:
        """Polls it until it has ended; returns it."""
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """Polls none any more."""
        self._closing.set()
        self._thread.join(CLOSES_WITHIN_S)

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            for handle in list(self._handles):
                if handle.poll() is not None:
                    self._handles.remove(handle)
