"""Where a late token was delayed: on the device, in the worker, in the engine core or on its way to the client.

A gap at the client is what the device took from one step to the next, and what each part of a token's way took longer
than it had for the token before. So the parts add up to the gap, and clocks that drift apart slowly make no difference.
"""

from __future__ import annotations

import bisect
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.gpu_gaps import BASE_S, SETTLE_STEPS, Timeline, Update

LATE_S = 0.0005
"""Beyond the median gap before the update."""


class Step(NamedTuple):
    """A step in the worker. Seconds of time.perf_counter."""

    done: float
    """The device had copied its tokens to the host."""
    got: float
    """The output thread had them."""
    handed: float
    """They were in the queue to the engine core."""


class Span(NamedTuple):
    """Something that a worker did beside its steps."""

    what: str
    begin: float
    end: float


@dataclass
class Trace:
    """What bench.traced_worker noted, of all rounds."""

    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, ranks: list[dict[str, Any]]) -> None:
        """What the ranks answered to `take_trace`. One of them hands tokens on."""
        for rank in ranks:
            self.steps.extend(Step(*step) for step in rank["steps"])
            self.spans.extend(Span(*span) for span in rank["spans"])
        self.steps.sort(key=lambda step: step.got)

    def parts(self, made: float, at: float) -> list[float] | None:
        """When the token that the core had at `made` and the client at `at` was where: done, got, handed, made, at."""
        index = bisect.bisect_right(self.steps, made, key=lambda step: step.got) - 1
        return [*self.steps[index], made, at] if index >= 0 else None


WAY = ("device", "to the output thread", "to the queue", "to the engine core", "to the client")


def late(timeline: Timeline, updates: list[Update], trace: Trace) -> list[dict[str, Any]]:
    """Every token around a swap that came late: its gap, by how much each part of the way is to blame (ms, together the
    gap less the usual one), and what the worker did meanwhile (ms from the moment when the device was done)."""
    found = []
    for number, update in enumerate(updates):
        before = timeline.gaps(update.began - BASE_S, update.began)
        if not before:
            continue
        usual = statistics.median(before)
        first = max(1, bisect.bisect_left(timeline.at, update.began))
        last = bisect.bisect_left(timeline.at, timeline.following(update.ended, SETTLE_STEPS))
        for i in range(first, last):
            if timeline.gap[i] - usual > LATE_S:
                found.append({"update": number, "told_ms": _ms(update.swap_began - timeline.at[i])})
                found[-1] |= _blamed(timeline, i, usual, trace)
    return found


def _blamed(timeline: Timeline, i: int, usual: float, trace: Trace) -> dict[str, Any]:
    one, two = (trace.parts(timeline.made[j], timeline.at[j]) for j in (i - 1, i))
    if one is None or two is None:
        return {"gap_ms": _ms(timeline.gap[i])}
    longer = [two[0] - one[0] - usual]
    longer += [(two[k] - two[k - 1]) - (one[k] - one[k - 1]) for k in range(1, len(WAY))]
    beside = [
        (span.what, _ms(span.begin - two[0]), _ms(span.end - two[0]))
        for span in trace.spans
        if span.end > min(two[0], one[4]) and span.begin < two[4]
    ]
    return {
        "gap_ms": _ms(timeline.gap[i]),
        "held_up": WAY[longer.index(max(longer))],
        "longer_ms": dict(zip(WAY, map(_ms, longer), strict=True)),
        "beside": beside,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def show(found: list[dict[str, Any]]) -> str:
    """A line for each late token."""
    return "\n".join(
        f"update {one['update']}: {one['gap_ms']:.2f} ms, told {one['told_ms']:+.2f} ms from its arrival, "
        f"held up: {one.get('held_up', 'unknown')} {one.get('longer_ms', '')} beside: {one.get('beside', '')}"
        for one in found
    )
