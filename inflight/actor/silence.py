"""Whether a request that brings no token is lost, or only has to wait for others.

A sample may take as long as its tokens take. What is bounded is the time without one, and a request that waits in the
engine's queue is not late for that: vLLM begins requests in the order in which they came.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENT = "generator silent"


@dataclass(eq=False)
class Call:
    """A request under way. Times are monotonic seconds."""

    asked: float
    heard: float | None = None
    """When its newest tokens came."""


@dataclass
class Calls:
    """The requests of this actor to one generator."""

    heard: float = float("-inf")
    """When the newest tokens of any of them came."""
    begun: float = float("-inf")
    """When the one that was asked last was asked, of those that have got tokens."""

    def hear(self, call: Call, now: float) -> None:
        """Tokens came."""
        call.heard = self.heard = now
        self.begun = max(self.begun, call.asked)

    def verdict(self, call: Call, now: float, bound_s: float) -> str | None:
        """Why a request is presumed lost, or None; one of

        `generator silent`: for `bound_s` nobody got a token of it;
        `stalled`: this request got none for `bound_s` after its first ones, while others were served;
        `passed over`: it has none yet, and one that was asked more than `bound_s` later has.
        """
        if now - max(self.heard, call.asked) > bound_s:
            return SILENT
        if call.heard is not None:
            return "stalled" if now - call.heard > bound_s else None
        return "passed over" if self.begun - call.asked > bound_s else None
