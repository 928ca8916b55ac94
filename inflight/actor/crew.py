"""A pool of child processes for calls of one kind: as many as are needed, up to a limit.

A call that was lost while others ran beside it, or in a child that others had used before, is retried once, alone in
a child: if it fails there, it is itself the cause, and no call fails because of another one.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from inflight.actor import calls
from inflight.actor.calls import Answer, Ask, Constructed, Make
from inflight.actor.output import Allowance
from inflight.actor.pending import CallFailed, ChildLost, NotMade
from inflight.actor.worker_process import Bounds, WorkerProcess

log = logging.getLogger(__name__)

MAX_NOT_MADE = 3
"""Children in a row that could not construct their task or tokenizer, after which no more are started."""
START_AGAIN_S = 1.0

_numbers = itertools.count()
_Waiting = tuple[int, bytes, asyncio.Future[asyncio.Future[Answer]]]
"""A call's number, its frame, and the future of the caller that waits for a child to take it."""


class Crew:
    """To be used from one event loop: `start`, `made`, then calls; `close` in any case."""

    def __init__(self, make: Make, bounds: Bounds, size: int) -> None:
        """At most `size` children, plus one for calls that were lost beside others, if calls run side by side."""
        self._make = make
        self._bounds = bounds
        self._size = size
        self._members: list[WorkerProcess] = []
        self._allowances: list[Allowance] = []
        """Those for the output of children that have ended, for the next ones."""
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._not_made: list[NotMade] = []
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._news = asyncio.Event()
        self._alone = Crew(make, replace(bounds, concurrency=1), 1) if bounds.concurrency > 1 else None
        self.ready = Constructed()
        """What the children report about their task or tokenizer; set when `made` has returned."""

    def start(self) -> None:
        """Starts the first child. Raises OSError when no process can be started."""
        allowance = self._allowances.pop() if self._allowances else Allowance()
        try:
            self._members.append(WorkerProcess(self._make, self._bounds, allowance, self._move))
        except OSError:
            self._allowances.append(allowance)
            raise

    async def made(self) -> None:
        """Returns when a child has constructed its task or tokenizer. Raises NotMade when the first one could not."""
        while not any(member.slots for member in self._members):
            if self._not_made:
                raise self._not_made[-1]
            self._news.clear()
            await self._news.wait()

    async def call(self, ask: Callable[[int], Ask]) -> Answer:
        """The answer to the call that `ask` builds from its number.

        Raises CallFailed or ChildLost; NotMade when no child can be started; for a call that can't be encoded,
        CallError or msgspec's errors.
        """
        number = next(_numbers)
        frame = calls.encode(ask(number))
        try:
            return await self._call(number, frame)
        except (ChildLost, CallFailed) as lost:
            if not lost.company or self._closed:
                raise
            log.info("a child that worked on several calls has ended (%s): each is retried once, alone", lost)
        return await (self._alone or self)._call(number, frame)

    async def close(self) -> None:
        """Kills all children and their descendants."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        await asyncio.gather(*(member.close() for member in self._members))
        if self._alone is not None:
            await self._alone.close()

    async def _call(self, number: int, frame: bytes) -> Answer:
        taken: asyncio.Future[asyncio.Future[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, frame, taken))
        self._move()
        return await (await taken)

    def _move(self) -> None:
        """Called after any change: hands out waiting calls, starts another child if all are busy."""
        self._news.set()
        for member in [member for member in self._members if member.over]:
            self._members.remove(member)
            self._allowances.append(member.allowance)
            if member.not_made is not None:
                self._not_made.append(member.not_made)
                # `made` raises the error of the first child, and `close` kills those that are being made.
                if self.ready != Constructed() and not self._closed:
                    log.warning("a child for foreign code could not be made: %s", member.not_made)
        if any(member.slots for member in self._members):
            self._not_made.clear()
            self.ready = next(member.ready for member in self._members if member.ready is not None)
        while self._waiting and (freest := self._freest()) is not None:
            number, frame, taken = self._waiting.popleft()
            if not taken.done():
                taken.set_result(freest.submit(number, frame))
        if len(self._not_made) >= MAX_NOT_MADE:
            self._give_up(self._not_made[-1])
        elif not self._closed:
            self._grow()

    def _freest(self) -> WorkerProcess | None:
        """The child with the most free slots; None when there is none."""
        member = max(self._members, key=lambda member: member.slots - member.load, default=None)
        return member if member is not None and member.slots > member.load else None

    def _grow(self) -> None:
        """Starts one more child when each has many of its slots in use, or calls wait; one at a time."""
        lasting = [member for member in self._members if member.lasting]
        busy = all(member.ready is not None and 4 * member.load >= member.slots for member in lasting)
        wanted = self._waiting if not lasting else busy
        if not wanted or len(lasting) >= self._size or self._retry is not None:
            return
        if self._not_made:  # not at once after a failure
            self._retry = asyncio.get_running_loop().call_later(START_AGAIN_S, self._start_again)
        else:
            self._start_one()

    def _start_again(self) -> None:
        self._retry = None
        self._start_one()

    def _start_one(self) -> None:
        """As `start`; that no process can be started is one more child that could not be made."""
        try:
            self.start()
        except OSError as error:
            self._not_made.append(NotMade(f"no process can be started: {error}"))
            log.warning("%s", self._not_made[-1])
            asyncio.get_running_loop().call_soon(self._move)

    def _give_up(self, why: NotMade) -> None:
        for _, _, taken in self._waiting:
            if not taken.done():
                taken.set_exception(why)
        self._waiting.clear()
