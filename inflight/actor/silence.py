"""Decides whether a request without new tokens is presumed lost, or only waits in the engine's queue.

The time for a whole sample is not bounded, the time without a token is. A request that waits in the engine's queue is
not late for that: vLLM begins requests in the order of their arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENT = "generator silent"


@dataclass(eq=False)
class Call:
    """A request in progress. Times are monotonic seconds."""

    asked: float
    heard: float | None = None
    """When its newest tokens arrived."""


@dataclass
class Calls:
    """The requests of this actor to one generator."""

    heard: float = float("-inf")
    """When the newest tokens of any request arrived."""
    begun: float = float("-inf")
    """Of the requests that have got tokens, when the latest one was sent."""

    def hear(self, call: Call, now: float) -> None:
        """Records that tokens arrived."""
        call.heard = self.heard = now
        self.begun = max(self.begun, call.asked)

    def verdict(self, call: Call, now: float, bound_s: float) -> str | None:
        """Why a request is presumed lost, or None; one of

        `generator silent`: for `bound_s` no request got a token from the generator;
        `stalled`: this request got no token for `bound_s` after its first ones, while others did;
        `passed over`: it has no token yet, while a request sent more than `bound_s` later has.
        """
        if now - max(self.heard, call.asked) > bound_s:
            return SILENT
        if call.heard is not None:
            return "stalled" if now - call.heard > bound_s else None
        return "passed over" if self.begun - call.asked > bound_s else None
