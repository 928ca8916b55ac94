"""The processes beside the trainer: one generator for all arms, and an actor for each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.bus import Listener, Received
from inflight.config import RunConfig, save
from inflight.messages import Routed, RoutesWanted, Status
from inflight.surroundings import computing
from inflight.types import Routes

END_S = 10.0


class Process:
    """One that writes to a log file and is ended with all that it has started."""

    def __init__(self, argv: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *argv],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **environment},
            )

    def require(self) -> None:
        """Raises RuntimeError when it has ended."""
        if (code := self._process.poll()) is not None:
            last = self.log.read_text(errors="replace").strip().splitlines() or ["nothing was said"]
            raise RuntimeError(f"exit code {code}: {last[-1][:300]} (all it said: {self.log})")

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.poll() is not None

    def end(self) -> None:
        """SIGTERM, then SIGKILL to its whole session."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        self.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)


def make_folder(config: RunConfig) -> None:
    """A run folder as the launcher makes it, without a key."""
    save(config)
    (config.path / "bus").mkdir()


class Actor:
    """The actor of an arm, started before the arm, and the sockets that it connects to."""

    def __init__(self, config: RunConfig) -> None:
        make_folder(config)
        self.config = config
        self._status = Listener(config.endpoint("status"), config.bus)
        self.rollouts = Listener(config.endpoint("rollouts"), config.bus)
        self.process = Process(
            ["-m", "inflight.actor", "--run-dir", config.run_dir, "--name", "a0"],
            config.path / "a0.log",
            {**computing(1), "CUDA_VISIBLE_DEVICES": ""},
        )

    def wait_ready(self, routes: Routes, timeout_s: float) -> None:
        """Sends `routes` as a buffer would, which the arm has not made yet, and returns when the actor would take
        questions. Raises RuntimeError."""
        deadline = time.monotonic() + timeout_s
        peer = self._hear(self.rollouts, lambda message: isinstance(message, RoutesWanted), deadline)
        self.rollouts.send(peer, Routed(routes=routes))
        self._hear(self._status, _is_sampling, deadline)

    def _hear(self, listener: Listener, wanted: Callable[[object], bool], deadline: float) -> str:
        """The peer that sent a message that is wanted; others are dropped. Raises RuntimeError."""
        while time.monotonic() < deadline:
            self.process.require()
            heard = listener.receive(0.2)
            if isinstance(heard, Received) and wanted(heard.message):
                return heard.peer
        raise RuntimeError(f"the actor was not ready in time (see {self.process.log})")

    def end(self) -> None:
        """Waits until it ends by itself, after the buffer has finished, and ends it if it does not."""
        self.process.wait(END_S)
        self.close()

    def close(self) -> None:
        """Ends it at once."""
        self.process.end()
        self.rollouts.close()
        self._status.close()


def _is_sampling(message: object) -> bool:
    return isinstance(message, Status) and message.values.get("phase") == "sampling"
