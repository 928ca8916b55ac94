"""Adds up what the gate decided: rewards of all groups from which a batch was selected, why groups were dropped."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.rollout.gate_result import GatedGroup


class GateTally:
    """The mean reward of all groups is the success rate. That of a batch is not, if a rule selects by reward."""

    def __init__(self) -> None:
        self.of_batch: list[float] = []
        """Rewards of all rollouts from which the last batch was selected: its own, and those dropped since the one
        before."""
        self._left_out: list[float] = []
        self._reasons: dict[str, str] = {}

    def leave_out(self, group: GatedGroup, reason: str) -> None:
        """Records a group that the gate has dropped, and the reason."""
        self._left_out += group.rewards
        self._reasons[group.group.group_id] = reason

    def train(self, batch: Iterable[GatedGroup]) -> None:
        """Records a batch that the trainer has taken."""
        self.of_batch = [*self._left_out, *(reward for group in batch for reward in group.rewards)]
        self._left_out = []

    def reject(self, batch: Iterable[GatedGroup], reason: str) -> None:
        """Groups that the trainer took could not be trained on."""
        self._reasons.update({each.group.group_id: reason for each in batch})

    def reasons(self) -> dict[str, str]:
        """Group → why it was dropped, of those since the last call."""
        reasons, self._reasons = self._reasons, {}
        return reasons
