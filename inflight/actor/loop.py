"""The actor: answers the questions that it is granted, sends the groups and keeps each until it is acknowledged.

Every input is an event in one queue, handled one after the other: messages of the buffer (a thread reads the link),
finished groups (one asyncio task each), the ticks that repeat unacknowledged deliveries, and the stop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import statistics
import time
from dataclasses import dataclass

from inflight.actor.called import ForeignError, GroupLost
from inflight.actor.deliveries import Deliveries
from inflight.actor.routing import Routing
from inflight.actor.sampler import Sampler
from inflight.actor.streak import Streak
from inflight.bus import BusError, Link, pumped
from inflight.completions import Unpatched
from inflight.error_line import one_line
from inflight.groups import group_id
from inflight.messages import (
    ActorBye,
    ActorHello,
    AnyMessage,
    Finish,
    Grant,
    GroupAck,
    GroupDone,
    GroupFailed,
    Refused,
    Routed,
    RoutesWanted,
)
from inflight.messages.reasons import ACTOR_STOPPED, DATA_ENDED, RUN_FINISHED
from inflight.tasks.course import NoMoreQuestions
from inflight.types import FIRST_FAILED, Value

log = logging.getLogger(__name__)

TICK_S = 1.0
REPEAT_AFTER_S = 5.0
MAX_LOGGED = 64
"""Most reasons of failed groups that are logged and remembered: as many as the trainer counts by name."""
MAX_DETAILS = 8
"""Most reasons of failed groups whose first one is reported with its details, every second."""
DETAIL = 200
"""Most characters of them."""
END_TIMEOUT_S = 5.0
"""Seconds for which the end waits for the last acknowledgements."""


class ActorError(RuntimeError):
    """The actor can't continue; the text is one line."""


@dataclass(frozen=True)
class StopRequested:
    """Event: the process was asked to end (SIGTERM)."""


@dataclass(frozen=True)
class _Tick:
    """Event: a second has passed, or a pause is over."""


Event = AnyMessage | StopRequested | _Tick | BaseException


class Actor:
    """One actor; the buffer decides which of the task's questions it answers."""

    def __init__(
        self,
        name: str,
        link: Link,
        sampler: Sampler,
        *,
        concurrency: int,
        give_up_after_s: float,
        routing: Routing | None = None,
    ) -> None:
        """With a `routing`, which is kept up to date, the actor asks for no groups before `join`."""
        self.name = name
        self._hello = ActorHello(actor=name, incarnation=secrets.token_hex(8))
        self._hello_sent = 0.0
        self._routing = routing or Routing()
        self._joined = routing is None
        self._link = link
        self._sampler = sampler
        self._concurrency = concurrency
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._deliveries = Deliveries(link)
        self._waiting: dict[str, int] = {}
        """Granted groups that are not started, in order: name → index of the question."""
        self.started = self.done = self.failed = 0
        self._streak = Streak(give_up_after_s)
        self._last_rewards: collections.deque[float] = collections.deque(maxlen=16)
        self._logged: set[str] = set()
        self._first: dict[str, str] = {}
        """Reason → details of the first group that failed by it."""

    @property
    def in_flight(self) -> int:
        """Number of groups being sampled or scored."""
        return len(self._running)

    def join(self) -> None:
        """Asks for groups: a generator is there that can answer. To be called from its event loop."""
        self._joined = True
        self._say_hello()

    def stop(self) -> None:
        """Makes `run` end soon and cleanly; to be called from its event loop."""
        self._events.put_nowait(StopRequested())

    async def run(self) -> str:
        """Works until the buffer sends Finish (its reason is returned) or `stop` is called.

        Raises ActorError when the buffer is lost or refuses this actor, when a generator does not tag its tokens, when
        foreign code can't be run any more, or when items have failed for `give_up_after_s` without one success.
        """
        with pumped(self._link, self._events.put_nowait, "actor link"):
            ticking = asyncio.create_task(self._tick(), name="actor tick")
            try:
                self._say_hello()
                while True:
                    event = await self._events.get()
                    if isinstance(event, Finish):
                        await self._end(RUN_FINISHED)
                        return event.reason
                    if isinstance(event, StopRequested):
                        await self._end(ACTOR_STOPPED)
                        return ACTOR_STOPPED
                    if isinstance(event, ActorError | ForeignError | Unpatched):
                        await self._end(ACTOR_STOPPED)
                        raise ActorError(str(event)) from None
                    self._handle(event)
            finally:
                ticking.cancel()
                await self._cancel_groups()

    def status(self) -> dict[str, Value]:
        """Counters for the progress view, and where the data end."""
        questions = self._sampler.questions
        return {
            **({} if questions is None else {"questions": questions}),
            "started": self.started,
            "done": self.done,
            "failed": self.failed,
            "in_flight": self.in_flight,
            "unacknowledged": len(self._deliveries),
            "aborted": self._sampler.answers.aborted,
            "retries": self._sampler.answers.retries,
            "continued": self._sampler.answers.continued,
            "tokens": self._sampler.answers.tokens,
            "scores": self._sampler.grader.scores,
            "score_s": self._sampler.grader.score_s,
            "accepted": self._deliveries.accepted.total(),
            **{f"accepted.{name}": tokens for name, tokens in self._deliveries.accepted.items()},
            "reward": statistics.fmean(self._last_rewards) if self._last_rewards else 0.0,
            **{f"{FIRST_FAILED}{reason}": detail for reason, detail in self._first.items()},
        }

    # --- events ----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, Grant):
            granted = {group_id(index, event.attempts.get(index, 0)): index for index in event.questions}
            self._waiting |= {name: index for name, index in granted.items() if not self._has(name)}
        elif isinstance(event, GroupAck):
            self._deliveries.acknowledged(event.group_id)
        elif isinstance(event, Routed):
            self._routing.routes = event.routes
        elif isinstance(event, Refused):
            raise ActorError(f"refused by the buffer: {event.reason}")
        elif isinstance(event, BusError):
            raise ActorError(f"the buffer is gone: {event}")
        elif isinstance(event, BaseException):
            raise event
        elif isinstance(event, _Tick):
            self._repeat()
        self._start_groups()

    def _has(self, name: str) -> bool:
        """Whether it has the group already: one that was presumed lost may be granted again."""
        return name in self._running or name in self._deliveries or name in self._waiting

    def _start_groups(self) -> None:
        while self._waiting and self.in_flight < self._streak.room(time.monotonic(), self._concurrency):
            name = next(iter(self._waiting))
            self.started += 1
            self._running[name] = asyncio.create_task(self._group(name, self._waiting.pop(name)), name=name)

    async def _group(self, name: str, index: int) -> None:
        """Produces one group from question to delivery; never raises."""
        try:
            group = await self._sampler.group(name, index)
        except GroupLost as lost:
            self._lost(name, lost)
        except NoMoreQuestions as end:
            self._deliveries.add(GroupFailed(group_id=name, reason=DATA_ENDED, again=False, questions=end.questions))
        except Exception as error:  # noqa: BLE001 - ends the actor through its queue
            self._events.put_nowait(error)
            return  # still in flight for the buffer: `_end` reports it as failed
        else:
            self._streak.succeeded()
            self.done += 1
            self._last_rewards.append(statistics.fmean(rollout.reward for rollout in group.rollouts))
            for reason in {rollout.unscored for rollout in group.rollouts} - {""}:
                self._log_once(reason, f"a rollout of group {name} is not scored and counts as 0: {reason}")
            self._deliveries.add(GroupDone(group=group))
        self._running.pop(name, None)
        self._events.put_nowait(_Tick())

    def _lost(self, name: str, lost: GroupLost) -> None:
        """Counts a failed group. Failures without a success slow the actor down, and finally end it."""
        self.failed += 1
        reason = lost.reason[:128]
        if len(self._first) < MAX_DETAILS:
            self._first.setdefault(reason, one_line(lost.detail, DETAIL))
        self._log_once(reason, f"group {name} failed: {lost}")
        lengths = lost.lengths
        self._deliveries.add(GroupFailed(group_id=name, reason=reason, again=lost.again, lengths=lengths))
        pause = self._streak.failed(time.monotonic(), outage=lost.again)
        asyncio.get_running_loop().call_later(pause, self._events.put_nowait, _Tick())
        if self._streak.hopeless(time.monotonic()):
            limit = f"no group was finished within {self._streak.give_up_after_s:g} s (rollout.give_up_after_s)"
            self._events.put_nowait(ActorError(f"{limit}, the last one failed: {lost}"))

    def _log_once(self, reason: str, text: str) -> None:
        if reason not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(reason)
            more = "; no further reason is logged" if len(self._logged) == MAX_LOGGED else ""
            log.warning("%s (logged once per reason%s)", text, more)

    # --- repeated until answered -----------------------------------------------------------------------------------

    def _repeat(self) -> None:
        self._deliveries.repeat(REPEAT_AFTER_S)
        # Lets an actor that was presumed dead rejoin.
        if not self._joined or time.monotonic() - self._hello_sent > REPEAT_AFTER_S:
            self._say_hello()

    def _say_hello(self) -> None:
        """Or asks where the generators are, before it joins."""
        self._hello_sent = time.monotonic()
        with contextlib.suppress(BusError):
            self._link.send(self._hello if self._joined else RoutesWanted())

    # --- the end ---------------------------------------------------------------------------------------------------

    async def _end(self, reason: str) -> None:
        """Cancels groups in progress, waits (bounded) until all deliveries are acknowledged, and says goodbye."""
        await self._cancel_groups()
        self.failed += len(self._running) + len(self._waiting)
        self._running.clear()
        self._waiting.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while self._deliveries:
                    event = await self._events.get()
                    if isinstance(event, GroupAck):
                        self._deliveries.acknowledged(event.group_id)
                    elif isinstance(event, BusError):
                        break
        if self._deliveries:
            log.warning("%d deliveries were not acknowledged before the end", len(self._deliveries))
        with contextlib.suppress(BusError):
            self._link.send(ActorBye(reason=reason))

    async def _cancel_groups(self) -> None:
        """Cancels groups in progress; they stay in `_running` as not settled."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- from the clock into the queue -----------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._events.put_nowait(_Tick())
