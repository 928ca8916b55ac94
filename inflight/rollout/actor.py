"""The actor: starts as many groups as it is granted, ships what comes of them and keeps it until acknowledged.

Everything that happens to it is an event in one queue, handled one after the other: messages of the buffer (a thread
reads the link), finished groups (a task each), the ticks that repeat unacknowledged deliveries, and the stop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.bus import BusError, Link
from inflight.messages import ActorHello, AnyMessage, Finish, Grant, GroupAck, GroupDone, GroupFailed, Refused
from inflight.rollout.client import Unpatched
from inflight.rollout.ledger import ACTOR_STOPPED, RUN_FINISHED
from inflight.rollout.numbers import Numbers
from inflight.rollout.sampler import GroupLost, Sampler

log = logging.getLogger(__name__)

TICK_S = 1.0
REPEAT_AFTER_S = 5.0
END_TIMEOUT_S = 5.0
"""How long the end waits for the last acknowledgements."""
MAX_FAILURES = 20
"""Failed groups in a row after which the actor gives up: the next would fail as well."""
MAX_PAUSE_S = 5.0
_POLL_S = 0.1


class ActorError(RuntimeError):
    """The actor can't go on; one line."""


@dataclass(frozen=True)
class Stop:
    """Event: the process was asked to end (SIGTERM)."""


@dataclass(frozen=True)
class _Tick:
    """Event: a second has passed, or a pause is over."""


Event = AnyMessage | Stop | _Tick | BaseException


class Actor:
    """One actor of `actors`, the index-th: its k-th group asks the task's question `index + k * actors`."""

    def __init__(
        self,
        name: str,
        link: Link,
        numbers: Numbers,
        sampler: Sampler,
        *,
        concurrency: int,
        index: int = 0,
        actors: int = 1,
    ) -> None:
        self.name = name
        self._link = link
        self._numbers = numbers
        self._sampler = sampler
        self._concurrency = concurrency
        self._index, self._actors = index, actors
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unacked: dict[str, tuple[GroupDone | GroupFailed, float]] = {}
        """Deliveries by group id, with when they were last sent (monotonic seconds)."""
        self._granted = self.started = self.done = self.failed = 0
        self._failures = 0
        self._paused_until = 0.0
        self._last_rewards: collections.deque[float] = collections.deque(maxlen=16)
        self._logged: set[str] = set()

    @property
    def in_flight(self) -> int:
        """Groups being sampled or scored."""
        return len(self._running)

    def stop(self) -> None:
        """Asks the actor to end soon and clean; call from its event loop."""
        self._events.put_nowait(Stop())

    async def run(self) -> str:
        """Works until the buffer says Finish (its reason is returned) or `stop` is called.

        Raises ActorError when the buffer is gone or refuses this actor, when a generator does not tag its tokens, or
        when MAX_FAILURES groups in a row have failed.
        """
        with self._pump():
            ticking = asyncio.create_task(self._tick(), name="actor tick")
            try:
                self._link.send(ActorHello(actor=self.name))
                while True:
                    event = await self._events.get()
                    if isinstance(event, Finish):
                        await self._end(RUN_FINISHED)
                        return event.reason
                    if isinstance(event, Stop):
                        await self._end(ACTOR_STOPPED)
                        return ACTOR_STOPPED
                    if isinstance(event, ActorError | Unpatched):
                        await self._end(ACTOR_STOPPED)
                        raise ActorError(str(event)) from None
                    self._handle(event)
            finally:
                ticking.cancel()
                await self._cancel_groups()

    def status(self) -> dict[str, float | int | str]:
        """Counters for the progress view."""
        return {
            "started": self.started,
            "done": self.done,
            "failed": self.failed,
            "in_flight": self.in_flight,
            "unacknowledged": len(self._unacked),
            "aborted": self._sampler.aborted,
            "retries": self._sampler.retries,
            "tokens": self._sampler.tokens_out,
            "reward": statistics.fmean(self._last_rewards) if self._last_rewards else 0.0,
        }

    # --- events ----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, Grant):
            self._granted = max(self._granted, event.groups)
        elif isinstance(event, GroupAck):
            self._unacked.pop(event.group_id, None)
        elif isinstance(event, Refused):
            raise ActorError(f"refused by the buffer: {event.reason}")
        elif isinstance(event, BusError):
            raise ActorError(f"the buffer is gone: {event}")
        elif isinstance(event, BaseException):
            raise event
        elif isinstance(event, _Tick):
            self._repeat()
        self._start_groups()

    def _start_groups(self) -> None:
        while (
            self.started < self._granted
            and self.in_flight < self._concurrency
            and time.monotonic() >= self._paused_until
        ):
            number = self._numbers.take()
            group_id = self._group_id(number)
            self.started += 1
            task = asyncio.create_task(self._group(group_id, self._index + number * self._actors), name=group_id)
            self._running[group_id] = task

    def _group_id(self, number: int) -> str:
        return f"{self.name}-{number}"

    async def _group(self, group_id: str, index: int) -> None:
        """One group from question to delivery; never raises."""
        try:
            group = await self._sampler.group(group_id, index)
        except GroupLost as lost:
            self._lost(group_id, lost)
        except Exception as error:  # noqa: BLE001 - ends the actor through its queue
            self._events.put_nowait(error)
            return  # still running as far as the books go: the end settles it
        else:
            self._failures = 0
            self.done += 1
            self._last_rewards.append(statistics.fmean(rollout.reward for rollout in group.rollouts))
            self._deliver(GroupDone(group=group), group_id)
        self._running.pop(group_id, None)
        self._events.put_nowait(_Tick())

    def _lost(self, group_id: str, lost: GroupLost) -> None:
        """Counts a failed group; failures in a row slow the actor down, too many of them end it."""
        self._failures += 1
        self.failed += 1
        if lost.reason not in self._logged:
            self._logged.add(lost.reason)
            log.warning("group %s failed: %s (told once a reason)", group_id, lost)
        self._deliver(GroupFailed(group_id=group_id, reason=lost.reason[:128]), group_id)
        pause = min(MAX_PAUSE_S, 0.05 * 2**self._failures)
        self._paused_until = time.monotonic() + pause
        asyncio.get_running_loop().call_later(pause, self._events.put_nowait, _Tick())
        if self._failures >= MAX_FAILURES:
            self._events.put_nowait(ActorError(f"{MAX_FAILURES} groups in a row failed, the last one: {lost}"))

    # --- delivery --------------------------------------------------------------------------------------------------

    def _deliver(self, message: GroupDone | GroupFailed, group_id: str) -> None:
        self._unacked[group_id] = (message, time.monotonic())
        self._send(message)

    def _repeat(self) -> None:
        now = time.monotonic()
        for group_id, (message, sent) in list(self._unacked.items()):
            if now - sent > REPEAT_AFTER_S:
                self._unacked[group_id] = (message, now)
                self._send(message)

    def _send(self, message: GroupDone | GroupFailed) -> None:
        """A link that can't take it now is no loss: unacknowledged deliveries are repeated."""
        with contextlib.suppress(BusError):
            self._link.send(message)

    # --- the end ---------------------------------------------------------------------------------------------------

    async def _end(self, reason: str) -> None:
        """Settles every granted group, then waits (bounded) until the buffer has acknowledged all of them."""
        await self._cancel_groups()
        self.failed += len(self._running)
        for group_id in self._running:
            self._deliver(GroupFailed(group_id=group_id, reason=reason), group_id)
        # An actor that leaves on its own says so with a group that it will not start, be it granted or not: the
        # buffer may be sending it a grant right now, and the first such word stops further ones.
        leaving = reason == ACTOR_STOPPED and not self._running
        self._running.clear()
        self._decline(self._granted - self.started + leaving, reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while self._unacked:
                    event = await self._events.get()
                    if isinstance(event, GroupAck):
                        self._unacked.pop(event.group_id, None)
                    elif isinstance(event, Grant):
                        self._granted = max(self._granted, event.groups)
                        self._decline(self._granted - self.started, reason)
                    elif isinstance(event, BusError):
                        break
        if self._unacked:
            log.warning("%d deliveries were not acknowledged before the end", len(self._unacked))

    def _decline(self, groups: int, reason: str) -> None:
        """Gives back slots whose groups were never started."""
        for _ in range(groups):
            self.started += 1
            self.failed += 1
            group_id = self._group_id(self._numbers.take())
            self._deliver(GroupFailed(group_id=group_id, reason=reason), group_id)

    async def _cancel_groups(self) -> None:
        """Cancels what is still under way; those groups stay in `_running`, unsettled."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- from the link's thread and the clock into the queue ---------------------------------------------------------

    @contextlib.contextmanager
    def _pump(self) -> Iterator[None]:
        """A thread moves what the link receives into the queue; it ends with the context or with the link."""
        loop, ended = asyncio.get_running_loop(), threading.Event()

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        def pump() -> None:
            while not ended.is_set():
                try:
                    message = self._link.receive(_POLL_S)
                except BusError as error:
                    put(error)
                    return
                if message is not None:
                    put(message)

        thread = threading.Thread(target=pump, name="actor link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._events.put_nowait(_Tick())
