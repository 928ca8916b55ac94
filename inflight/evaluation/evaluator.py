"""The evaluator: does what the trainer orders, one evaluation at a time, and reports its answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

from inflight.actor.called import ForeignError
from inflight.bus import BusError, Link, pumped
from inflight.completions import Unpatched
from inflight.config import EvalConfig
from inflight.error_line import one_line
from inflight.evaluation.answer import Answered
from inflight.evaluation.asking import Asking
from inflight.evaluation.figures import figures, reasons
from inflight.messages import AnyMessage, Evaluate, Evaluated, EvaluatorHello, Finish, Refused, StopEvaluating
from inflight.messages.reasons import ACTOR_STOPPED
from inflight.types import Value

log = logging.getLogger(__name__)

HELLO_EVERY_S = 5.0


class EvaluatorError(RuntimeError):
    """The evaluator can't continue; one line."""


class Evaluator:
    """All that happens to it is an event in one queue: messages of the trainer, the end of the link, the stop."""

    def __init__(self, config: EvalConfig, link: Link, asking: Asking) -> None:
        self._config = config
        self._link = link
        self._asking = asking
        self._hello = EvaluatorHello(incarnation=secrets.token_hex(8), answers=asking.answers)
        self._events: asyncio.Queue[AnyMessage | BaseException | None] = asyncio.Queue()
        self._number = 0
        """Of the newest order or stop."""
        self._working: asyncio.Task[None] | None = None
        self._result: Evaluated | None = None
        self.done = 0
        """Evaluations that were answered."""
        self.late = 0
        """Evaluations that were not done in time."""

    def stop(self) -> None:
        """Asks it to end; call from its event loop."""
        self._events.put_nowait(None)

    async def run(self) -> str:
        """Works until the trainer says Finish (its reason is returned) or `stop` is called.

        Raises EvaluatorError when the trainer is gone or refuses this process, when a generator does not tag its
        tokens, and when the task's code can't be run any more.
        """
        with pumped(self._link, self._events.put_nowait, "evaluator link"):
            greeting = asyncio.create_task(self._greet(), name="evaluator hello")
            try:
                while (event := await self._events.get()) is not None:
                    if isinstance(event, Finish):
                        return event.reason
                    await self._handle(event)
                return ACTOR_STOPPED
            finally:
                greeting.cancel()
                await self._cancel()

    def status(self) -> dict[str, Value]:
        """Counters for the live view and for Prometheus."""
        answers = self._asking.done if self._working is not None else 0
        return {"evaluations": self.done, "late": self.late, "answers": answers, "wanted": self._asking.answers}

    async def _handle(self, event: AnyMessage | BaseException) -> None:
        match event:
            case Evaluate():
                await self._order(event)
            case StopEvaluating() if event.number >= self._number:
                self._number = event.number
                await self._cancel()
            case Refused():
                raise EvaluatorError(f"refused by the trainer: {event.reason}")
            case BusError():
                raise EvaluatorError(f"the trainer is gone: {event}")
            case BaseException():
                raise EvaluatorError(one_line(event)) from event

    async def _order(self, order: Evaluate) -> None:
        if self._result is not None and self._result.number == order.number:
            self._send(self._result)
        elif order.number > self._number:
            await self._cancel()
            self._number = order.number
            self._working = asyncio.create_task(self._evaluate(order), name=f"evaluation of version {order.version}")

    async def _evaluate(self, order: Evaluate) -> None:
        """Never raises but for its cancellation."""
        log.info("version %d: %d answers are asked of %s", order.version, self._asking.answers, order.url)
        came: list[Answered] = []
        problem = ""
        try:
            async with asyncio.timeout(order.timeout_s):
                await self._asking.ask(order.url, order.version, settled=came.append)
        except TimeoutError:
            problem = f"{len(came)} of {self._asking.answers} answers came within {order.timeout_s:.3g} s"
        except (ForeignError, Unpatched) as error:
            self._events.put_nowait(error)
            return
        except Exception as error:
            log.exception("the evaluation of version %d failed", order.version)
            self._events.put_nowait(error)
            return
        found = figures(came, self._config.pass_k, self._config.correct_at)
        self._result = Evaluated(number=order.number, figures=found, failed=reasons(came), problem=problem)
        self.done += not problem
        self.late += bool(problem)
        self._working = None
        self._send(self._result)

    def _send(self, message: EvaluatorHello | Evaluated) -> None:
        with contextlib.suppress(BusError):  # an order is repeated, and with it the answer
            self._link.send(message)

    async def _cancel(self) -> None:
        working, self._working = self._working, None
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _greet(self) -> None:
        while True:
            self._send(self._hello)
            await asyncio.sleep(HELLO_EVERY_S)
