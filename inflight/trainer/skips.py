"""Counts updates that were skipped because their gradient is not finite; too many in a row end the run."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.trainer.updates import Update


class LearnError(RuntimeError):
    """Training is impossible: successive gradients are not finite."""


class Skips:
    """The counts of a run."""

    def __init__(self, at_most: int) -> None:
        """`at_most`: skipped updates in a row at which the run ends (`trainer.max_skipped_updates`)."""
        self._at_most = at_most
        self._in_a_row = self._untold = 0
        self._last = ""

    def note(self, updates: Sequence[Update]) -> str:
        """Counts the updates of a batch; returns a remark on skipped ones, empty if there are none."""
        norms = [f"{each.grad_norm}" for each in updates if not each.taken]
        for each in updates:
            self._in_a_row = 0 if each.taken else self._in_a_row + 1
        self._untold += len(norms)
        if not norms:
            return ""
        self._last = f"the gradient's norm is {norms[-1]}"
        return f"{self._last}: {len(norms)} of {len(updates)} updates of the batch skipped"

    def require(self) -> None:
        """Raises LearnError when too many updates were skipped since the last one that was taken."""
        if self._in_a_row >= self._at_most:
            raise LearnError(
                f"{self._last}: {self._in_a_row} updates in a row were skipped "
                f"(trainer.max_skipped_updates={self._at_most})"
            )

    def told(self) -> dict[str, object]:
        """The part of a step's line: how many were skipped since the last one."""
        skipped, self._untold = self._untold, 0
        return {"updates_skipped": skipped}
