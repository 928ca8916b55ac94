"""How long answers are, of all that were asked for and of those that came: whether a run loses the long ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inflight.types import RolloutGroup


@dataclass
class Lengths:
    """Sums over samples since the start of the process; in completion tokens."""

    samples_lost: int = 0
    """Of groups that failed."""
    tokens_lost: int = 0
    """As far as those samples had come."""
    samples_finished: int = 0
    """Of groups that came, whatever the gate says of them later."""
    tokens_finished: int = 0

    def lost(self, lengths: Iterable[int]) -> None:
        """A group failed; its samples had come so far."""
        for length in lengths:
            self.samples_lost += 1
            self.tokens_lost += length

    def finished(self, group: RolloutGroup) -> None:
        """A whole group came."""
        self.samples_finished += len(group.rollouts)
        self.tokens_finished += sum(len(rollout.turn.token_ids) for rollout in group.rollouts)

    def values(self) -> dict[str, float]:
        """Mean lengths; 0 where there is nothing to average."""
        asked, tokens = self.samples_lost + self.samples_finished, self.tokens_lost + self.tokens_finished
        return {
            "length_asked": tokens / asked if asked else 0.0,
            "length_finished": self.tokens_finished / self.samples_finished if self.samples_finished else 0.0,
        }
