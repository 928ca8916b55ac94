"""A run of real processes that tests do harm to (not a test file)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from inflight.groups import index_of
from inflight.metrics import METRICS_FILE, read_lines
from inflight.report import summary
from inflight.rollout.books import Books
from inflight.rollout.stream import Reader
from inflight.trainer.checkpoint import index
from inflight.types import Route, Routes

LAUNCHER = Path(__file__).parent / "launcher.py"
ALWAYS = (
    "trainer.groups_per_step=2",
    "trainer.checkpoint_every=2",
    "rollout.group_size=2",
    "launch.line_every_s=1",
    "bus.heartbeat_s=0.2",
    "bus.dead_after_s=5",
    "publish.join_timeout_s=120",
    "launch.restart_delay_s=0.2",
)
BOUND_S = 240.0
"""Against hanging; no measure of speed."""


def free_port() -> int:
    """The first of five consecutive ports without a listener."""
    for port in range(20000 + os.getpid() % 20000, 65000, 5):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for offset in range(5):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
    raise AssertionError("no port is free")


class Run:
    """Starts the launcher on one folder as often as a test wants."""

    def __init__(self, folder: Path, *overrides: str, vllm: bool = False) -> None:
        self.folder = folder
        self._command = ["-m", "inflight.launcher", "--config-name", "tiny"] if vllm else [str(LAUNCHER)]
        self._overrides = [f"run_dir={folder}", *ALWAYS, *overrides]
        self._launcher: subprocess.Popen[str] | None = None
        self.output = ""
        """Of the last launcher that has ended."""

    def start(self, *more: str) -> Run:
        """The launcher, in the background."""
        command = [sys.executable, *self._command, *self._overrides, *more]
        # As a user would: tests that run an engine in this process have set vLLM's variables for it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self._launcher = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        return self

    def resume(self) -> Run:
        """The same command with `resume=true`."""
        return self.start("resume=true")

    def ended(self) -> bool:
        """Whether the launcher is gone."""
        return self._launcher is None or self._launcher.poll() is not None

    def wait(self, bound_s: float = BOUND_S) -> int:
        """The launcher's exit code; its output is kept."""
        self.output, _ = self._launcher.communicate(timeout=bound_s)
        return self._launcher.returncode

    def process(self, name: str) -> psutil.Process | None:
        """The launcher, `trainer`, `g0` or `a0`; None while it does not run."""
        if self.ended():
            return None
        launcher = psutil.Process(self._launcher.pid)
        if name == "launcher":
            return launcher
        for child in launcher.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                line = child.cmdline()
                if line[-1:] == [name] or (name == "trainer" and "inflight.trainer" in line):
                    return child
        return None

    def kill(self, name: str, number: int = signal.SIGKILL) -> bool:
        """False when it does not run."""
        try:
            process = self.process(name)
            if process is not None:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return process is not None

    def until(self, condition: Callable[[], bool], *, alive: bool = False, bound_s: float = BOUND_S) -> None:
        """Polls; a launcher that ends first is enough, too, unless it must stay `alive`."""
        deadline = time.monotonic() + bound_s
        while not condition() and not self.ended():
            assert time.monotonic() < deadline, f"it did not happen within {bound_s:g} s\n{self.logs()}"
            time.sleep(0.05)
        assert not (alive and self.ended()), f"the run has ended\n{self.wait()}\n{self.logs()}"

    def steps(self) -> int:
        """Lines of metrics.jsonl."""
        return len(self.lines())

    def lines(self) -> list[dict[str, object]]:
        """What the trainer reported of its steps."""
        return read_lines(self.folder / METRICS_FILE)

    def trained(self) -> list[int]:
        """The questions of all steps."""
        return sorted(index for line in self.lines() for index in line["questions"])

    def written(self) -> list[int]:
        """The questions of the rollout file."""
        return sorted(index_of(group.group_id) for group in Reader(self.folder / "rollouts" / "rollouts.msgpack"))

    def account(self) -> Books:
        """The books of a run that is done, held against its files: each group that was asked is in exactly one place.

        At each step granted = in flight + failed + produced and produced = trained + dropped + buffered; at the end
        nothing is in flight or buffered, and what was produced is what the rollout file holds, group by group.
        """
        trained: list[int] = []
        for line in self.lines():
            trained += line["questions"]
            produced = len(trained) + sum(line["groups_dropped"].values()) + line["buffer"]
            failed = sum(line["groups_failed"].values())
            assert line["groups_granted"] == line["groups_in_flight"] + failed + produced, line
        last, books, written = self.lines()[-1], self.saved().books, self.written()
        assert (last["groups_in_flight"], last["buffer"]) == (0, 0), last
        assert (books.trained, books.dropped, books.failed) == (
            len(trained),
            last["groups_dropped"],
            last["groups_failed"],
        )
        assert len(set(trained)) == len(trained), "a question was trained on twice"
        assert len(set(written)) == len(written), "a group was written twice"
        assert set(trained) <= set(written)
        assert len(written) == len(trained) + sum(books.dropped.values()), (books, written)
        assert all(index in books.settled for index in written)
        return books

    def aborted(self) -> int:
        """Requests that engines gave up, by what their rollouts tell."""
        return summary.summarize(self.folder).aborted

    def routed(self) -> dict[str, Route]:
        """The generators that may be asked now."""
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode((self.folder / "bus" / "routes.json").read_bytes(), type=Routes).generators
        return {}

    def saved(self) -> index.Saved:
        """The newest checkpoint."""
        return index.read(index.newest(self.folder))

    def logs(self) -> str:
        """For the message of a test that failed."""
        texts = [f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join([self.output[-2000:], *texts])

    def end(self) -> None:
        """Ends all processes of the run."""
        if not self.ended():
            os.kill(self._launcher.pid, signal.SIGTERM)
            self.wait()
