"""Names of groups, and the validation of a finished group, for actor and buffer."""

from __future__ import annotations

import re

import numpy as np

from inflight.arrays import Floats
from inflight.types import Rollout, RolloutGroup, version_array

MAX_VOCABULARY = 1 << 24
"""Larger than any model's vocabulary."""
LARGEST = 1e18
"""Largest magnitude of a reward or log-probability: float32, in which they are used, can hold its square."""
_GROUP_ID = re.compile(r"q(0|[1-9][0-9]{0,17})(?:\.([1-9][0-9]{0,3}))?")


def group_id(index: int, attempt: int = 0) -> str:
    """Name of the group for question `index`; `attempt` counts its earlier groups that were too stale."""
    return f"q{index}.{attempt}" if attempt else f"q{index}"


def index_of(name: str) -> int | None:
    """The question index of a group; None for a name that `group_id` does not produce."""
    match = _GROUP_ID.fullmatch(name)
    return int(match[1]) if match else None


def first_name(name: str) -> str:
    """Name of the first group for the same question: later ones use the same sampling seeds."""
    return name.partition(".")[0]


def attempt_of(name: str) -> int:
    """How many groups for the same question were too stale before this one; 0 for an unknown kind of name."""
    match = _GROUP_ID.fullmatch(name)
    return int(match[2] or 0) if match else 0


def defect(group: RolloutGroup, group_size: int, vocabulary: int) -> str | None:
    """The reason why a received group can't be used, by which it is counted; None for a valid one.

    Groups that pass are written to the run folder and trained on, also after a resume: nothing may pass that a model
    with a vocabulary of `vocabulary` tokens can't process.
    """
    rollouts = group.rollouts
    if len(rollouts) != group_size or len({rollout.rollout_id for rollout in rollouts}) != group_size:
        return "malformed: group size"
    if any(rollout.group_id != group.group_id for rollout in rollouts):
        return "malformed: group id"
    if any(rollout.prompt_ids != rollouts[0].prompt_ids for rollout in rollouts):
        return "malformed: prompts differ"
    if not rollouts[0].prompt_ids:
        return "malformed: prompt"
    for rollout in rollouts:
        turn = rollout.turn
        ids = [rollout.prompt_ids.values, turn.token_ids.values, *([] if turn.kept is None else [turn.kept.ids])]
        if any(each.max(initial=0) >= vocabulary for each in ids):
            return "malformed: token ids"
        if len(turn.logprobs) != len(turn.token_ids) or not _all_usable(turn.logprobs):
            return "malformed: logprobs"
        if not all(map(is_usable, (rollout.reward, *rollout.rewards.values()))):
            return "malformed: reward"
        if not _evidence_fits(rollout):
            return "malformed: evidence"
        try:
            version_array(turn.token_versions, len(turn.token_ids))
        except ValueError:
            return "malformed: versions"
    return None


def is_usable(number: float) -> bool:
    """Whether a number can be trained on: neither NaN nor infinite, nor so large that arithmetic overflows."""
    return abs(number) <= LARGEST


def _all_usable(numbers: Floats) -> bool:
    return bool((np.abs(numbers.values) <= LARGEST).all())


def _evidence_fits(rollout: Rollout) -> bool:
    """Whether the data recorded for each token has as many entries as there are tokens, all finite."""
    length = len(rollout.turn.token_ids)
    turn = rollout.turn
    steps = rollout.step_rewards
    teacher = rollout.teacher_logprobs
    return (
        (turn.kept is None or len(turn.kept) == length)
        and (turn.routed_experts is None or turn.routed_experts.shape[0] <= len(rollout.prompt_ids) + length)
        and all(step.index < length and is_usable(step.reward) for step in steps)
        and (teacher is None or (len(teacher) == length and _all_usable(teacher)))
    )
