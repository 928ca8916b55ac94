"""The gate's rules: pure functions `(group: GatedGroup, *, options...) -> GatedGroup`.

A rule looks at spans, versions, lags, masks and rewards, and masks tokens, drops members or drops the group, each with
a reason that it is counted by. A rule of your own is a function like these (docs/objectives.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from inflight.arrays import Flags
from inflight.rollout.gate_result import GatedGroup, GatedRollout, GroupDrop, SequenceDrop

RULES = {
    name: f"inflight.rollout.rules:{name}"
    for name in (
        "token_lag",
        "trained_share",
        "oldest_lag",
        "mean_lag",
        "whole_group",
        "smallest_group",
        "uniform_rewards",
        "truncated",
    )
}


def token_lag(group: GatedGroup, *, at_most: int) -> GatedGroup:
    """Masks tokens older than `at_most` versions: they stay as context of the following tokens."""
    return mask_tokens(group, lambda member: member.lags.values <= at_most, "too old")


def trained_share(group: GatedGroup, *, at_least: float) -> GatedGroup:
    """Drops members with a smaller share of unmasked tokens than `at_least`, and those without any."""

    def stale(member: GatedRollout) -> bool:
        kept = int(member.mask.values.sum())
        return kept == 0 or kept / len(member.mask) < at_least

    return drop_members(group, stale, SequenceDrop.STALE)


def oldest_lag(group: GatedGroup, *, at_most: int) -> GatedGroup:
    """Drops members with a token older than `at_most` versions: rejects whole sequences."""
    return drop_members(group, lambda member: member.lags.values.max() > at_most, SequenceDrop.OLDEST)


def mean_lag(group: GatedGroup, *, at_most: float) -> GatedGroup:
    """Drops members whose tokens are older than `at_most` versions on average."""
    return drop_members(group, lambda member: float(member.lags.values.mean()) > at_most, SequenceDrop.MEAN)


def whole_group(group: GatedGroup) -> GatedGroup:
    """Drops a group that has lost a member."""
    return drop_group(group, GroupDrop.INCOMPLETE) if group.members_dropped else group


def smallest_group(group: GatedGroup, *, at_least: int) -> GatedGroup:
    """Drops a group with fewer than `at_least` members left."""
    return drop_group(group, f"fewer than {at_least} usable rollouts") if len(group.rollouts) < at_least else group


def uniform_rewards(group: GatedGroup, *, tolerance: float = 0.0) -> GatedGroup:
    """Drops a group whose rewards differ by no more than `tolerance`: its advantages would be zero. The buffer
    continues with the next group, so that a step has its number of groups: dynamic sampling (DAPO, arXiv
    2503.14476)."""
    spread = max(group.rewards) - min(group.rewards)
    return drop_group(group, GroupDrop.UNIFORM) if spread <= tolerance else group


def truncated(group: GatedGroup) -> GatedGroup:
    """Masks all tokens of sequences that `rollout.max_tokens` or `generator.max_model_len` cut off, and drops these;
    their rewards count for the baseline (overlong filtering of DAPO, arXiv 2503.14476, section 3.4)."""

    def cut_off(member: GatedRollout) -> bool:
        return member.rollout.turn.finish_reason == "length"

    masked = mask_tokens(group, lambda member: [not cut_off(member)] * len(member.mask), SequenceDrop.TRUNCATED)
    return drop_members(masked, cut_off, SequenceDrop.TRUNCATED)


# --- what rules are made of --------------------------------------------------------------------------------------


def mask_tokens(
    group: GatedGroup, keep: Callable[[GatedRollout], Sequence[bool] | NDArray[np.bool_]], reason: str
) -> GatedGroup:
    """Masks the tokens for which `keep` [T] is False, and counts those that were not masked before."""
    members = []
    masked = 0
    for member in group.rollouts:
        kept = Flags(keep(member))
        if len(kept) != len(member.mask):
            raise ValueError(f"a rule masks {len(kept)} tokens of {len(member.mask)}")
        mask = Flags(member.mask.values & kept.values)
        masked += int(member.mask.values.sum() - mask.values.sum())
        members.append(replace(member, mask=mask))
    return replace(group, rollouts=members, masked=_count(group.masked, reason, masked))


def drop_members(group: GatedGroup, unwanted: Callable[[GatedRollout], bool], reason: str) -> GatedGroup:
    """Excludes the members for which `unwanted` is true."""
    keep = [not unwanted(member) for member in group.rollouts]
    dropped = _count(group.members_dropped, reason, len(keep) - sum(keep))
    return replace(group, rollouts=list(compress(group.rollouts, keep)), members_dropped=dropped)


def drop_group(group: GatedGroup, reason: str) -> GatedGroup:
    """Drops the whole group."""
    return replace(group, rollouts=[], dropped=reason)


def _count(counts: dict[str, int], reason: str, more: int) -> dict[str, int]:
    return dict(Counter(counts) + Counter({reason: more}))
