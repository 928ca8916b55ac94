"""Advantages relative to the group: how much better a completion is than the others of its prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

STD_EPSILON = 1e-6
"""Keeps a group whose rewards hardly differ from being blown up."""


def group_relative(rewards: Sequence[float], *, scale_by_std: bool) -> list[float]:
    """[G] `A_i = r_i - mean(r)`, divided by `std(r) + STD_EPSILON` when `scale_by_std`; std over the whole group.

    With the division this is GRPO's outcome advantage (arXiv 2402.03300, section 4.1.2). Without it, it is that of
    Dr. GRPO (arXiv 2503.20783, section 3): dividing weighs questions that are nearly always or never solved more than
    the others. Its second correction, no division by a sequence's own length, is in the loss: every token of a step
    weighs the same. Equal rewards give zeros either way.

    Example: `group_relative([1.0, 0.0], scale_by_std=False) == [0.5, -0.5]`
    """
    mean = statistics.fmean(rewards)
    scale = statistics.pstdev(rewards) + STD_EPSILON if scale_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]
