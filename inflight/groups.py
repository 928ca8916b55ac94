"""A finished group, for both ends of its way: how it is named after its question, and whether it can be learnt from."""

from __future__ import annotations

import re

from inflight.types import Rollout, RolloutGroup, versions_of_tokens

MAX_VOCABULARY = 1 << 24
"""No model has more tokens."""
LARGEST = 1e18
"""Of a reward or a log-probability: they are learnt from in float32, which holds its square."""
_GROUP_ID = re.compile(r"q(0|[1-9][0-9]{0,17})(?:\.([1-9][0-9]{0,3}))?")


def group_id(index: int, attempt: int = 0) -> str:
    """Name of the group that answers the index-th question; its `attempt` counts how often one was too old before."""
    return f"q{index}.{attempt}" if attempt else f"q{index}"


def index_of(name: str) -> int | None:
    """The question of a group; None when the name is none that `group_id` gives."""
    match = _GROUP_ID.fullmatch(name)
    return int(match[1]) if match else None


def first_name(name: str) -> str:
    """Name of the first answer to the same question: its sampling seeds are those of all later ones."""
    return name.partition(".")[0]


def attempt_of(name: str) -> int:
    """How often an answer to the same question was too old before this one; 0 for a name that is none."""
    match = _GROUP_ID.fullmatch(name)
    return int(match[2] or 0) if match else 0


def defect(group: RolloutGroup, group_size: int, vocabulary: int) -> str | None:
    """Why a received group can't be used, as a reason to count it by; None when it is sound.

    What it lets pass is written to the run folder and trained on, there and by a run that goes on: nothing that a model
    of `vocabulary` tokens can't take may pass.
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
        if any(max(ids, default=0) >= vocabulary for ids in (rollout.prompt_ids, turn.token_ids, *(turn.kept or ()))):
            return "malformed: token ids"
        if len(turn.logprobs) != len(turn.token_ids) or not all(map(is_usable, turn.logprobs)):
            return "malformed: logprobs"
        if not is_usable(rollout.reward):
            return "malformed: reward"
        if not _evidence_fits(rollout):
            return "malformed: evidence"
        try:
            versions_of_tokens(turn.token_versions, len(turn.token_ids))
        except ValueError:
            return "malformed: versions"
    return None


def is_usable(number: float) -> bool:
    """Whether a number can be learnt from: neither NaN nor infinite, nor of a size that computing makes so."""
    return abs(number) <= LARGEST


def _evidence_fits(rollout: Rollout) -> bool:
    """Whether what was recorded beside the tokens has their number, and finite values."""
    length, turn = len(rollout.turn.token_ids), rollout.turn
    steps, teacher = rollout.step_rewards, rollout.teacher_logprobs
    return (
        (turn.kept is None or len(turn.kept) == length)
        and (turn.routed_experts is None or turn.routed_experts.shape[0] <= len(rollout.prompt_ids) + length)
        and all(step.index < length and is_usable(step.reward) for step in steps)
        and (teacher is None or (len(teacher) == length and all(map(is_usable, teacher))))
    )
