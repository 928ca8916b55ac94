"""The trainer's reports: one line per step, one line per swap, and a status each second."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from inflight.bus import BusError, Link
from inflight.config import RunConfig
from inflight.error_line import one_line
from inflight.messages import Status
from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, JsonLines
from inflight.rollout.buffer import Buffer
from inflight.trainer.exported import TrainerMetrics
from inflight.trainer.lines import swap_line
from inflight.trainer.now import now
from inflight.trainer.trackers import Trackers
from inflight.types import Value
from inflight.weights.publish.events import Swap
from inflight.weights.publish.publisher import Publisher

_TICK_S = 0.2
_STATUS_S = 1.0
WARNINGS_KEPT = 16
"""Number of warnings in the status: several, so that none is missed when two occur in a second."""
log = logging.getLogger(__name__)


class Reporter:
    """Owns the files and a thread that sends the status and records swaps. Leaving it writes the remaining swaps."""

    def __init__(self, config: RunConfig, link: Link) -> None:
        run_dir = Path(config.run_dir)
        self._metrics = JsonLines(run_dir / METRICS_FILE)
        self._swaps = JsonLines(run_dir / SWAPS_FILE)
        self._evaluations = JsonLines(run_dir / EVAL_FILE) if config.eval.every else None
        self._link = link
        self._lock = threading.Lock()
        self._values: dict[str, Value] = {"steps": config.trainer.steps}
        self._warnings: deque[str] = deque(maxlen=WARNINGS_KEPT)
        self._publisher: Publisher | None = None
        self._now: Callable[[], dict[str, Value]] = dict
        self._trackers: Trackers | None = None
        self.exported = TrainerMetrics(config)
        """The same figures for Prometheus."""
        self._noted = 0
        self._error: OSError | None = None
        """Why swaps can't be written."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer report", daemon=True)
        self._thread.start()

    def follow(self, publisher: Publisher, buffer: Buffer) -> None:
        """Records the swaps of this publisher from now on; how it and the buffer stand goes into each status."""
        self._publisher = publisher
        self._now = lambda: now(publisher, buffer)
        self.exported.follow(publisher, buffer)

    def track(self, trackers: Trackers) -> None:
        """Shows all further lines there, too."""
        self._trackers = trackers

    def phase(self, text: str) -> None:
        """Sets the trainer's phase, for the status."""
        with self._lock:
            self._values["phase"] = text

    def warn(self, text: str) -> None:
        """Shows a line to the user at once: in the log, and on the launcher's screen."""
        log.warning("%s", text)
        with self._lock:
            self._warnings.append(one_line(text, 1000))
            self._values["warnings"] = "\n".join(self._warnings)

    def line(self, values: dict[str, object]) -> None:
        """Writes a step's line and puts its numbers into the status. Raises OSError when the disk is full."""
        if self._error is not None:
            raise self._error
        self._metrics.write(values)
        self.exported.step(values)
        self._show(values)
        with self._lock:
            self._values.update({k: v for k, v in values.items() if isinstance(v, int | float | str)})
            self._values["groups_dropped"] = sum(_counts(values.get("groups_dropped")))

    def evaluation(self, values: dict[str, object]) -> None:
        """Writes an evaluation's line; its reward goes into the status. Raises OSError when the disk is full."""
        if self._evaluations is None:
            return
        self._evaluations.write(values | {"time": round(time.time(), 6)})
        self.exported.evaluation(values)
        self._show(values)
        with self._lock:
            self._values["evaluations"] = int(self._values.get("evaluations", 0)) + 1
            if isinstance(reward := values.get("eval/reward"), float):
                self._values |= {"eval_reward": reward, "eval_step": int(str(values["step"]))}
                self._values["eval_of"] = _size(values)

    def _show(self, values: dict[str, object]) -> None:
        if self._trackers is not None:
            self._trackers.log(int(str(values["step"])), values)

    def _run(self) -> None:
        due = 0.0
        while not self._closing.wait(_TICK_S):
            try:
                self._note_swaps()
            except OSError as error:  # a full disk: logged once; the next `line` raises in the trainer and ends the run
                if self._error is None:
                    log.error("%s can't be written: %s", SWAPS_FILE, error)
                self._error = error
            if time.monotonic() >= due:
                due = time.monotonic() + _STATUS_S
                self._send()

    def _note_swaps(self) -> None:
        events = self._publisher.events_since(self._noted) if self._publisher is not None else []
        for event in events:
            self._swaps.write(swap_line(event))
            self.exported.event(event)
            self._noted += 1
            if isinstance(event, Swap):
                with self._lock:
                    self._values["gap_ms"] = event.gap_s * 1e3
                    if event.running is not None:
                        self._values["running_at_swap"] = event.running

    def _send(self) -> None:
        with self._lock:
            values = dict(self._values)
        values |= self._now()
        with contextlib.suppress(BusError):  # no launcher listens: one that died has ended this process or will
            self._link.send(Status(source="trainer", values=values))

    def close(self) -> None:
        """Stops the thread, sends a last status, closes the files."""
        self._closing.set()
        self._thread.join(timeout=5)
        self._send()
        files = [self._metrics, self._swaps, *([self._evaluations] if self._evaluations is not None else [])]
        for last in (self._note_swaps, *(file.close for file in files)):
            try:
                last()
            except OSError as error:  # logged only: the error that ends the run must not be hidden by it
                log.error("the reports are not complete: %s", error)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(evaluation: dict[str, object]) -> str:
    """How far the reward of an evaluation may be off by chance; empty where its line does not say."""
    error = evaluation.get("eval/reward_stderr")
    questions = evaluation.get("eval/questions")
    plus_minus = f"± {error:.2g}, " if isinstance(error, float) else ""
    return f"{plus_minus}n={questions:.0f}" if isinstance(questions, int | float) else ""


def _counts(value: object) -> list[int]:
    return list(value.values()) if isinstance(value, dict) else []
