"""A call of a child process, as the actor sees it: an answer, or a GroupLost with the reason by which it is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec

from inflight.actor.calls import Answer, Ask, CallError, Constructed
from inflight.actor.pending import CallFailed, ChildLost, NotMade

log = logging.getLogger(__name__)

T = TypeVar("T")


class GroupLost(Exception):
    """A group that was started and will not be delivered; it is counted by `reason`, the text is for the log."""

    def __init__(self, reason: str, detail: str, *, again: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.again = again
        """Whether the question should be re-queued, because a generator was at fault."""
        self.lengths: list[int] = []
        """Completion tokens of its samples, as far as they were received."""


class ForeignError(RuntimeError):
    """No process for foreign code can be started any more."""


class Caller(Protocol):
    """Something that runs calls of foreign code: a Crew."""

    ready: Constructed

    async def call(self, ask: Callable[[int], Ask]) -> Answer:
        """The answer. Raises CallFailed, ChildLost or NotMade, CallError or msgspec's errors."""


class Traces:
    """Writes the traceback of the first failure of each kind of call to the log: of all of them would fill it."""

    def __init__(self) -> None:
        self._seen = set[str]()

    def first(self, what: str, about: str, error: CallFailed) -> None:
        """Takes a failure."""
        if error.trace and what not in self._seen:
            self._seen.add(what)
            log.warning("the first error of the %s, with %s:\n%s", what, about, error.trace)


async def called(
    caller: Caller, what: str, about: str, ask: Callable[[int], Ask], limit_s: float, traces: Traces
) -> Answer:
    """The answer to what `ask` makes of the call's number; `what` begins the reason of a failure, `about` names the
    item and `limit_s` is what a call may take, both for the log. Raises GroupLost or ForeignError."""
    late = GroupLost(f"{what} timeout", f"{about}: not done within {limit_s:g} s")
    try:
        return await caller.call(ask)
    except CallFailed as error:
        traces.first(what, about, error)
        raise late if error.late else GroupLost(f"{what} error: {error.kind}", f"{about}: {error}") from None
    except ChildLost as lost:
        raise late if lost.late else GroupLost(f"{what} crash: {lost}", f"{about} ended its process") from None
    except NotMade as error:
        raise ForeignError(f"no process for the {what} can be started: {error}") from None
    except (CallError, msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise GroupLost(f"{what} error: {type(error).__name__}", f"{about} can't be sent: {error}") from None


async def all_of(parts: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the rest, waits for their end and is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
