"""What the gate has judged: the rewards of all groups that a batch was chosen from, and why groups were dropped."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.rollout.gated import GatedGroup


class Judged:
    """The mean reward of all groups is the success rate. That of a batch is not, where a rule looks at rewards."""

    def __init__(self) -> None:
        self.of_batch: list[float] = []
        """Of all rollouts that the last batch was chosen from: its own, and those left out since the batch before."""
        self._left_out: list[float] = []
        self._reasons: dict[str, str] = {}

    def leave_out(self, group: GatedGroup, reason: str) -> None:
        """The gate has dropped a group."""
        self._left_out += group.rewards
        self._reasons[group.group.group_id] = reason

    def train(self, batch: Iterable[GatedGroup]) -> None:
        """The trainer has taken a batch."""
        self.of_batch = [*self._left_out, *(reward for group in batch for reward in group.rewards)]
        self._left_out = []

    def reject(self, batch: Iterable[GatedGroup], reason: str) -> None:
        """Groups that the trainer took could not be trained on."""
        self._reasons.update({each.group.group_id: reason for each in batch})

    def reasons(self) -> dict[str, str]:
        """Group → why it was dropped, of those since the last call."""
        reasons, self._reasons = self._reasons, {}
        return reasons
