"""Mean lengths of completions, for all requested and for those delivered: shows whether a run loses the long ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inflight.types import RolloutGroup


@dataclass
class Lengths:
    """Sums over samples since the process started; lengths in completion tokens."""

    samples_lost: int = 0
    """Samples of groups that failed."""
    tokens_lost: int = 0
    """Tokens of these samples, as far as they were received."""
    samples_finished: int = 0
    """Samples of groups that were delivered, whatever the gate decides later."""
    tokens_finished: int = 0

    def lost(self, lengths: Iterable[int]) -> None:
        """A group failed; `lengths` are the tokens received of its samples."""
        for length in lengths:
            self.samples_lost += 1
            self.tokens_lost += length

    def finished(self, group: RolloutGroup) -> None:
        """A complete group was delivered."""
        self.samples_finished += len(group.rollouts)
        self.tokens_finished += sum(len(rollout.turn.token_ids) for rollout in group.rollouts)

    def values(self) -> dict[str, float]:
        """Mean lengths; 0 if there are no samples."""
        asked = self.samples_lost + self.samples_finished
        tokens = self.tokens_lost + self.tokens_finished
        return {
            "length_asked": tokens / asked if asked else 0.0,
            "length_finished": self.tokens_finished / self.samples_finished if self.samples_finished else 0.0,
        }
