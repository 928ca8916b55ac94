"""Which rollouts of a run are shown: by name, reward, lag and version."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from inflight.groups import first_name
from inflight.report.answers import ShownRollout
from inflight.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    def holds(self, number: float) -> bool:
        """Whether the number is in the range; NaN is in none."""
        return self.least <= number <= self.most

    def holds_any(self, numbers: Iterable[float]) -> bool:
        """Whether one of the numbers is in the range."""
        return any(map(self.holds, numbers))


def range_of(text: str) -> Range:
    """`3`, `2:5`, `2:` (2 and more) or `:5` (5 and less). Raises ValueError for anything else."""
    least, separator, most = text.partition(":")
    try:
        low = float(least) if least else -math.inf
        high = (float(most) if most else math.inf) if separator else low
    except ValueError:
        low = math.nan
        high = math.nan
    if not low <= high or text in ("", ":"):
        raise ValueError(f"{text!r} is no range: a number such as 3, or 2:5, 2: or :5")
    return Range(low, high)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a rollout must be like to be shown; None asks for nothing."""

    name: str | None = None
    """A group such as `q5` with its later attempts, one attempt `q5.1`, or one rollout `q5/0`."""
    reward: Range | None = None
    lag: Range | None = None
    version: Range | None = None
    dropped: bool = False
    """Only rollouts that were not trained on."""

    def names(self, group: RolloutGroup) -> bool:
        """Whether something of the group may be asked for by its name."""
        if self.name is None:
            return True
        wanted = self.name.partition("/")[0]
        return wanted in (group.group_id, first_name(group.group_id))

    def takes(self, answer: ShownRollout) -> bool:
        """Whether the rollout is to be shown, of a group that `names` is true of."""
        if self.name is not None and "/" in self.name and answer.rollout.rollout_id != self.name:
            return False
        if self.dropped and answer.trained_at is not None and not answer.left_out:
            return False
        if self.reward is not None and not self.reward.holds(answer.rollout.reward):
            return False
        if self.version is not None and not self.version.holds_any(answer.versions or ()):
            return False
        return self.lag is None or self.lag.holds_any(answer.lags or ())
