"""The rewards of all groups that the gate has judged, beside those of the groups that are trained on."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.rollout.gated import GatedGroup


class JudgedRewards:
    """Their mean is the success rate. That of a batch is not, where a rule looks at rewards."""

    def __init__(self) -> None:
        self.of_batch: list[float] = []
        """Of all rollouts that the last batch was chosen from: its own, and those left out since the batch before."""
        self._left_out: list[float] = []

    def leave_out(self, group: GatedGroup) -> None:
        """The gate has dropped a group."""
        self._left_out += group.rewards

    def train(self, batch: Iterable[GatedGroup]) -> None:
        """The trainer has taken a batch."""
        self.of_batch = [*self._left_out, *(reward for group in batch for reward in group.rewards)]
        self._left_out = []
