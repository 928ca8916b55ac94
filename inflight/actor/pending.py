"""A call of a child process in progress, and the ways in which it ends without a result."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from inflight.actor.calls import Answer, Raised


class CallFailed(Exception):
    """A call failed by itself: it raised, or its result can't be used."""

    def __init__(self, kind: str, text: str, *, trace: str = "", late: bool = False, company: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.trace = trace
        """Where a reward raised, several lines; empty where there is nothing to show."""
        self.late = late
        self.company = company
        """The process is out of memory, which other calls may have filled."""


class ChildLost(Exception):
    """The child ended during the call."""

    def __init__(self, how: str, *, late: bool, company: bool) -> None:
        super().__init__(how)
        self.late = late
        """The child was killed because a call was late."""
        self.company = company
        """Other calls ran beside this one, or, unless it was late, before it: any of them may be at fault."""


class NotMade(Exception):
    """The child could not construct its task or tokenizer; the text says why."""

    def __init__(self, why: str, *, bad_input: bool = False) -> None:
        super().__init__(why)
        self.bad_input = bad_input
        """Another child would fail as well."""


@dataclass
class PendingCall:
    """A call that was sent, and its answer."""

    result: asyncio.Future[Answer]
    since: float = field(default_factory=time.monotonic)
    """When it was sent; once it has begun, when it began."""
    begun: bool = False
    timer: asyncio.TimerHandle | None = None

    def answer(self, message: Answer | Raised, *, first: bool) -> None:
        """The child has answered; `first`: it has had no other call."""
        if isinstance(message, Raised):
            company = message.spent and not message.late and not first
            error = CallFailed(message.kind, message.text, trace=message.trace, late=message.late, company=company)
            self.fail(error)
        else:
            self._end()
            if not self.result.done():  # else the caller has given up
                self.result.set_result(message)

    def fail(self, error: CallFailed | ChildLost) -> None:
        """The call gets no answer."""
        self._end()
        if not self.result.done():
            self.result.set_exception(error)

    def _end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
