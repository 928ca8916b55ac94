"""Evaluations of versions while training continues: pins a version, has the evaluator ask, and keeps the result.

One at a time. Each is bounded; whatever its outcome, its pin ends.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from inflight.bus import BusError, Listener, Lost, Received
from inflight.config import EvalConfig
from inflight.messages import AnyMessage, Evaluate, Evaluated, EvaluatorHello, Finish, StopEvaluating
from inflight.messages.base import MAX_REASON
from inflight.metrics import EVAL_GIVEN_UP
from inflight.trainer.checkpoint.best import Best
from inflight.types import Route
from inflight.weights.publish.pin import Pin
from inflight.weights.publish.publisher import Publisher

log = logging.getLogger(__name__)

REPEAT_S = 5.0
"""The interval of an order that was not answered."""
GRACE_S = 1.0
"""What the evaluator gets beyond eval.timeout_s to say how far it came, and the pin beyond that."""
JOIN_S = 5.0
_POLL_S = 0.1
COUNTS = ("questions", "answers", "mixed", "failed")
"""Figures of an evaluation that was given up: a mean over a part of the answers is no mean of all."""


@dataclass
class _Evaluation:
    """One that is under way."""

    number: int
    step: int
    pin: Pin
    nominee: Path | None
    begun: float
    deadline: float
    order_at: float = 0.0
    """When the order is to be sent next."""
    result: Evaluated | None = None
    """All answers; then only the nominee is waited for."""
    seconds: float = 0.0
    """From the beginning to the result."""


class Evaluations:
    """Owns a thread that hears the evaluator and takes an evaluation from the pin to its line in eval.jsonl."""

    def __init__(
        self,
        config: EvalConfig,
        listener: Listener,
        publisher: Publisher,
        best: Best | None,
        *,
        written_s: float,
        done: Collection[int] = (),
        tell: Callable[[dict[str, object]], None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`best` keeps checkpoints, each of which is written within `written_s` of its nomination; `done` are the steps
        that were evaluated before the run was resumed; `tell` takes the line of an evaluation, `warn` a line for the
        user. The caller closes the listener."""
        self.best = best
        self._config = config
        self._listener = listener
        self._publisher = publisher
        self._tell = tell
        self._warn = warn
        self._clock = clock
        self._written_s = written_s
        self._done = frozenset(done)
        self._numbers = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())
        self._current: _Evaluation | None = None
        self._evaluator = ""
        """The peer that is there; empty: none."""
        self._incarnation = ""
        self._warned_slow = False
        """Whether a warning was logged that training waits for an evaluation."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluations", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        with self._changed:
            return self._current is not None

    def due(self, step: int) -> bool:
        """Whether the version of a step is to be evaluated."""
        due = step % self._config.every == 0 and (step > 0 or self._config.at_start)
        return due and step not in self._done

    def begin(self, step: int, nominee: Path | None) -> None:
        """Evaluates the newest version, that of `step`; returns at once. To be called before the next publication, and
        once the previous evaluation is over (`wait_idle`).

        `nominee` is its checkpoint, where the best is kept.
        """
        with self._changed:
            routed = self._config.training_requests == "continue"
            now = self._clock()
            pin = self._publisher.pin(step, self._config.timeout_s + 2 * GRACE_S, routed=routed)
            deadline = now + self._config.timeout_s
            self._current = _Evaluation(next(self._numbers), step, pin, nominee, now, deadline)

    def wait_idle(self, step: int, wait: Callable[[], bool]) -> bool:
        """Waits for the evaluation that is under way, which is bounded, while `wait()` says so: that of `step` is due.
        Logs a warning the first time. Returns whether `begin` can be called."""
        with self._changed:
            current = self._current
            if current is not None and not self._warned_slow:
                self._warned_slow = True
                self._warn(
                    f"training waits at step {step}: its evaluation is due, and that of version {current.step} is "
                    f"still under way. An evaluation takes longer than eval.every={self._config.every} steps"
                )
            self._wait(wait)
            return not self.busy and self._thread.is_alive()

    def settle(self, *, wait: Callable[[], bool]) -> None:
        """Waits for the evaluation that is under way while `wait()` says so, and gives it up then. None follows."""
        with self._changed:
            self._wait(wait)
            if self._current is not None:
                self._give_up(self._current, "the run ends")

    def _wait(self, wait: Callable[[], bool]) -> None:
        while self._current is not None and self._thread.is_alive() and wait():
            self._changed.wait(_POLL_S)

    def finish(self, reason: str) -> None:
        """Tells the evaluator that the run is over."""
        with self._changed:
            self._send(Finish(reason=reason))

    def close(self) -> None:
        """Ends the thread; bounded. A second call does nothing."""
        self._closing.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                event = self._listener.receive(_POLL_S)
                with self._changed:
                    if self.best is not None:
                        self.best.sweep()
                    if event is not None:
                        self._hear(event)
                    if self._current is not None:
                        self._advance(self._current)
            except BusError as error:
                self._abandon(f"the evaluator can't be heard any more: {error}")
                return
            except OSError as error:  # a full disk
                self._abandon(f"an evaluation can't be kept: {error}")

    def _abandon(self, reason: str) -> None:
        with self._changed:
            current, self._current = self._current, None
            if current is not None:
                self._publisher.unpin(current.pin, reason)
            self._changed.notify_all()
        if not self._closing.is_set():
            self._warn(reason)

    def _hear(self, event: Received | Lost) -> None:
        if isinstance(event, Lost):
            if event.peer == self._evaluator:
                self._evaluator = self._incarnation = ""
            return
        match event.message:
            case EvaluatorHello(incarnation=incarnation):
                self._evaluator = event.peer
                if incarnation != self._incarnation and self._current is not None:
                    self._current.order_at = 0.0  # a process that was started again knows of no order
                self._incarnation = incarnation
            case Evaluated() if self._current is not None and event.message.number == self._current.number:
                self._answered(self._current, event.message)
            case Evaluated():  # a repeat, or of one that was given up
                pass
            case other:
                log.warning("%s from %s is ignored", type(other).__name__, event.peer)

    def _advance(self, current: _Evaluation) -> None:
        """Gives the order, repeats it, and notices that the evaluation can't be done any more."""
        now = self._clock()
        if current.result is not None:
            self._conclude(current, current.result, now)
        elif current.pin.ended:
            self._give_up(current, current.pin.ended)
        elif now >= current.deadline + GRACE_S:
            missing = "" if self._evaluator else ", and no evaluator is there"
            where = "by the evaluator" if current.pin.generator else "for lack of a generator that holds the version"
            self._give_up(current, f"not done within {self._config.timeout_s:g} s (eval.timeout_s) {where}{missing}")
        elif (route := current.pin.route) is not None and now >= current.order_at and self._evaluator:
            current.order_at = now + REPEAT_S
            self._send(self._order(current, route, now))

    @staticmethod
    def _order(current: _Evaluation, route: Route, now: float) -> Evaluate:
        left_s = max(0.0, current.deadline - now)
        return Evaluate(number=current.number, version=current.pin.version, url=route.url, timeout_s=left_s)

    def _answered(self, current: _Evaluation, result: Evaluated) -> None:
        """All answers have arrived, or the evaluator has stopped with a problem."""
        if result.problem:
            self._give_up(current, result.problem, result)
        elif current.result is None:
            self._publisher.unpin(current.pin, "its evaluation is done")
            current.result = result
            current.seconds = round(self._clock() - current.begun, 3)

    def _conclude(self, current: _Evaluation, result: Evaluated, now: float) -> None:
        """Writes the line, once the nominee is written, or will not be."""
        nominee = current.nominee
        if nominee is not None and not nominee.exists():
            if now < current.begun + self._written_s:
                return
            self._warn(f"the checkpoint of version {current.step} is not there and can't become the best")
        figures = {f"eval/{name}": value for name, value in result.figures.items()}
        values: dict[str, object] = {**figures, **self._of(current), "eval/failed_by": result.failed}
        self._current = None
        self._changed.notify_all()
        missing = {"mixed": result.figures.get("mixed", 0), "failed": result.figures.get("failed", 0)}
        if not any(missing.values()) and "reward" in result.figures:
            values |= self._elect(current.nominee, result.figures)
            self._note(current.step, values, None)
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in result.failed.items())
        self._warn(f"the evaluation of version {current.step} is not whole, and no candidate for best/: {reasons}")
        self._note(current.step, values, current.nominee)

    def _elect(self, nominee: Path | None, figures: dict[str, float]) -> dict[str, object]:
        if self.best is None or nominee is None or not nominee.exists():
            return {}
        return {"eval/best": self.best.consider(nominee, figures)}

    def _give_up(self, current: _Evaluation, reason: str, result: Evaluated | None = None) -> None:
        self._publisher.unpin(current.pin, reason[:MAX_REASON])
        self._send(StopEvaluating(number=current.number))
        self._current = None
        self._changed.notify_all()
        counts = {} if result is None else {f"eval/{name}": result.figures.get(name, 0) for name in COUNTS}
        failed: dict[str, object] = {} if result is None else {"eval/failed_by": result.failed}
        values: dict[str, object] = {EVAL_GIVEN_UP: reason, **counts, **failed, **self._of(current)}
        self._note(current.step, values, current.nominee)

    def _of(self, current: _Evaluation) -> dict[str, object]:
        """Values of any evaluation."""
        seconds = current.seconds if current.result is not None else round(self._clock() - current.begun, 3)
        return {"generator": current.pin.generator, "eval/seconds": seconds}

    def _note(self, step: int, values: dict[str, object], rejected: Path | None) -> None:
        """Writes the line, and removes a nominee that did not become the best."""
        if given_up := values.get(EVAL_GIVEN_UP):
            self._warn(f"the evaluation of version {step} was given up: {given_up}")
        if rejected is not None and self.best is not None:
            self.best.reject(rejected)
        self._tell({"step": step, "version": step, **values})

    def _send(self, message: AnyMessage) -> None:
        try:
            if self._evaluator:
                self._listener.send(self._evaluator, message)
        except BusError as error:  # it is noticed as lost, and an order is repeated
            log.warning("%s", error)
