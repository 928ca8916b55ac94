"""What a client saw: when each step's tokens came, and what an update added to the time between tokens."""

from __future__ import annotations

import bisect
import statistics
from array import array
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


@dataclass
class Timeline:
    """Arrivals at the client: one entry per step that brought tokens. Seconds of time.perf_counter."""

    at: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("l"))
    gap: array[float] = field(default_factory=lambda: array("d"))
    """The longest time that any sequence of this step had waited since its last token; 0 when all are new."""
    made: array[float] = field(default_factory=lambda: array("d"))
    """When the engine core had the step's outputs, by its own clock, which is the same one on one machine."""

    def add(self, at: float, tokens: int, gap: float, made: float = 0.0) -> None:
        """One step's arrival."""
        self.at.append(at)
        self.tokens.append(tokens)
        self.gap.append(gap)
        self.made.append(made)

    def gaps(self, start: float, stop: float) -> list[float]:
        """Longest gaps of the steps that arrived in `[start, stop)`, without first tokens."""
        low = bisect.bisect_left(self.at, start)
        high = bisect.bisect_left(self.at, stop)
        return [gap for gap in self.gap[low:high] if gap > 0]

    def made_gaps(self, start: float, stop: float) -> list[float]:
        """Times between outputs in the engine core, for the steps that arrived in `[start, stop)`."""
        low = bisect.bisect_left(self.at, start)
        high = bisect.bisect_left(self.at, stop)
        return [self.made[i] - self.made[i - 1] for i in range(max(1, low), high)]

    def unbroken(self, start: float, stop: float) -> bool:
        """Whether steps arrived in `[start, stop)`, none of them the first of fresh sequences."""
        low = bisect.bisect_left(self.at, start)
        high = bisect.bisect_left(self.at, stop)
        return low < high and all(gap > 0 for gap in self.gap[low:high])

    def following(self, moment: float, steps: int) -> float:
        """When the `steps`-th step after `moment` arrived; the last one's time when there are fewer."""
        index = bisect.bisect_left(self.at, moment) + steps
        return self.at[min(index, len(self.at) - 1)] if self.at else moment

    def rate(self, start: float, stop: float) -> float:
        """Tokens a second between two moments."""
        low = bisect.bisect_left(self.at, start)
        high = bisect.bisect_left(self.at, stop)
        return sum(self.tokens[low:high]) / (stop - start) if stop > start else 0.0


@dataclass
class Update:
    """One update as the bench saw it. Moments are seconds of time.perf_counter."""

    began: float
    ended: float
    swap_began: float
    """When the engine got the order to swap (or to stop, where it is stopped)."""
    trainer_blocked_s: float = 0.0
    packed_s: float = 0.0
    """The part of it in which the publisher packed."""
    transfer_s: float = 0.0
    remap_s: float = 0.0
    remap_parts_s: tuple[float, ...] = ()
    """Unmap, map, access; the slowest rank's of each."""
    waited_s: float = 0.0
    """For the step in flight, before the remap: useful work."""
    aborted: int = 0
    recomputed: int = 0


@dataclass
class Judged:
    """What one update cost at the client."""

    base_s: float
    extra_s: float
    """The longest gap around the swap, less the median gap before the update began."""
    during_s: float
    """Sum over the whole update of what gaps were longer than the base."""
    core_extra_s: float
    """As `extra_s`, between outputs in the engine core: without their way to the client."""


SETTLE_STEPS = 3
BASE_S = 0.25


def judge(timeline: Timeline, update: Update) -> Judged:
    """Compares an update's gaps with the quarter of a second before it."""
    before = timeline.gaps(update.began - BASE_S, update.began)
    stop = timeline.following(update.ended, SETTLE_STEPS)
    around = timeline.gaps(update.swap_began, stop)
    if not before or not around:
        raise RuntimeError("the load ended before an update did: raise tokens or shorten round_s")
    base = statistics.median(before)
    during = timeline.gaps(update.began, stop)
    made_before = timeline.made_gaps(update.began - BASE_S, update.began)
    made_around = timeline.made_gaps(update.swap_began, stop)
    core = max(made_around) - statistics.median(made_before) if made_before and made_around else 0.0
    return Judged(base, max(around) - base, sum(gap - base for gap in during), core)


def control(timeline: Timeline, updates: list[Update]) -> list[float]:
    """The same figure where there was no update: halfway between two of them, over as many steps. Not where a round of
    fresh sequences began meanwhile, nor between updates that leave no quiet moment."""
    extras = []
    for one, two in pairwise(updates):
        middle = (one.ended + two.began) / 2
        length = one.ended - one.swap_began
        if two.began - one.ended < 3 * BASE_S or not timeline.unbroken(middle - BASE_S, middle + length):
            continue
        fake = Update(began=middle, ended=middle + length, swap_began=middle)
        extras.append(judge(timeline, fake).extra_s)
    return extras


def summarize(strategy: str, timeline: Timeline, updates: list[Update], baseline_rate: float) -> dict[str, Any]:
    """The figures of one cell, in milliseconds and tokens a second."""
    judged = [judge(timeline, update) for update in updates]
    extra = [1e3 * one.extra_s for one in judged]
    quiet = [1e3 * value for value in control(timeline, updates)]
    span = (updates[0].began, timeline.following(updates[-1].ended, SETTLE_STEPS)) if updates else (0.0, 0.0)
    gaps = [1e3 * gap for gap in timeline.gaps(*span)]

    def spread(values: list[float]) -> dict[str, float]:
        return {
            "p50": round(percentile(values, 0.5), 3),
            "p99": round(percentile(values, 0.99), 3),
            "max": round(max(values, default=0.0), 3),
        }

    return {
        "strategy": strategy,
        "updates": len(updates),
        "extra_gap_ms": spread(extra),
        "control_gap_ms": spread(quiet),
        "controls": len(quiet),
        "core_extra_gap_ms": spread([1e3 * one.core_extra_s for one in judged]),
        "gap_ms": spread(gaps),
        "base_gap_ms": round(1e3 * statistics.median([one.base_s for one in judged]), 3) if judged else 0.0,
        "decode_time_lost_ms": spread([1e3 * one.during_s for one in judged]),
        "update_ms": spread([1e3 * (update.ended - update.began) for update in updates]),
        "transfer_ms": spread([1e3 * update.transfer_s for update in updates]),
        "remap_ms": spread([1e3 * update.remap_s for update in updates]),
        "remap_parts_ms": [
            spread([1e3 * part for part in parts])
            for parts in zip(*(update.remap_parts_s for update in updates if update.remap_parts_s), strict=True)
        ],
        "trainer_blocked_ms": spread([1e3 * update.trainer_blocked_s for update in updates]),
        "tokens_per_s_without": round(baseline_rate, 1),
        "tokens_lost_per_update": round(
            statistics.median([one.during_s for one in judged]) * baseline_rate if judged else 0.0, 1
        ),
        "aborted": sum(update.aborted for update in updates),
        "recomputed": sum(update.recomputed for update in updates),
        "updates_raw": [asdict(update) for update in updates],
        "extra_gap_raw_ms": [round(value, 3) for value in extra],
        "gaps_around_raw_ms": [
            [round(1e3 * gap, 2) for gap in timeline.gaps(update.swap_began, timeline.following(update.ended, 3))]
            for update in updates
        ],
        "core_gaps_around_raw_ms": [
            [round(1e3 * gap, 2) for gap in timeline.made_gaps(update.swap_began, timeline.following(update.ended, 3))]
            for update in updates
        ],
    }
