"""Advantages: functions of the rewards of a step's groups; they do not depend on the model.

`(groups, *, options...) -> advantages`: `groups` has all members of each group of the step, including those that the
gate dropped (see rollout/gate.py); `advantages[g][i]` is a number for all tokens of member i, or a list, one per token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from inflight.config import AdvantageConfig
from inflight.named import find, with_options
from inflight.types import Rollout

Groups = Sequence[Sequence[Rollout]]
Advantages = list[list[float | list[float]]]
Advantage = Callable[[Groups], Advantages]

STD_EPSILON = 1e-6
"""Keeps nearly equal rewards from being amplified."""

ADVANTAGES = {
    name: f"inflight.trainer.advantage:{name}"
    for name in ("group_mean", "group_std", "rloo", "reinforce_pp", "process", "distillation")
}


def advantage_of(config: AdvantageConfig) -> Advantage:
    """The configured function. Raises ConfigError that names an unknown advantage or option."""
    place = "trainer.advantage"
    return with_options(find(config.name, ADVANTAGES, f"{place}.name"), config.options, f"{place}.options")


def group_mean(groups: Groups) -> Advantages:
    """`A_i = r_i - mean(r)` over the group: the outcome advantage of Dr. GRPO (arXiv 2503.20783).

    Dividing by the deviation would give more weight to questions that are nearly always or never solved.
    """
    return [list(_centred(group)) for group in groups]


def group_std(groups: Groups, *, epsilon: float = STD_EPSILON) -> Advantages:
    """`A_i = (r_i - mean(r)) / (std(r) + epsilon)` over the group, std of the population: GRPO (arXiv 2402.03300,
    section 4.1.2). Equal rewards give zeros."""
    return [[each / (statistics.pstdev(_rewards(group)) + epsilon) for each in _centred(group)] for group in groups]


def rloo(groups: Groups) -> Advantages:
    """`A_i = r_i - mean(r of the others)`, leave-one-out (arXiv 2402.14740): the baseline excludes the sample itself.

    Equals `group_mean` times G / (G - 1). A group of one gives zero.
    """
    return [[each * len(group) / max(len(group) - 1, 1) for each in _centred(group)] for group in groups]


def reinforce_pp(groups: Groups, *, baseline: bool = True, epsilon: float = STD_EPSILON) -> Advantages:
    """`A = (x - mean(x)) / (std(x) + epsilon)` over all sequences of the step: REINFORCE++ (arXiv 2501.03262).

    `x` is the reward minus the mean of its group with `baseline` (the paper's REINFORCE++-baseline), else the reward.
    """
    raw = [list(_centred(group)) if baseline else _rewards(group) for group in groups]
    everything = [each for group in raw for each in group]
    mean = statistics.fmean(everything)
    std = statistics.pstdev(everything)
    return [[(each - mean) / (std + epsilon) for each in group] for group in raw]


def process(groups: Groups, *, epsilon: float = STD_EPSILON) -> Advantages:
    """Per token, from process rewards: `A_t = sum of (r_s - mean) / (std + epsilon)` over the steps s that end at t or
    later, mean and std over all step rewards of the group (GRPO with process supervision, arXiv 2402.03300,
    section 4.1.3). No value model, no GAE. A member without step rewards gets zeros. Raises ValueError when no member
    of any group has one: the task returns none, and there would be no signal.
    """
    if not any(member.step_rewards for group in groups for member in group):
        raise ValueError("trainer.advantage.name=process: no rollout of the step has step rewards (docs/tasks.md)")
    return [[_to_go(member, *_scale(group), epsilon) for member in group] for group in groups]


def distillation(groups: Groups, *, weight: float = 1.0, outcome: float = 0.0) -> Advantages:
    """Per token, from a teacher: `A_t = weight * (log p_teacher - log p_behave) + outcome * (r - mean(r))`.

    The first term is minus the one-sample estimate of the reverse KL divergence at that token, as in on-policy
    distillation (arXiv 2306.13649, 2306.08543). Raises ValueError for a rollout without teacher log-probabilities.
    """
    return [
        [_to_teacher(member, weight, outcome * centred) for member, centred in zip(group, _centred(group), strict=True)]
        for group in groups
    ]


def _rewards(group: Sequence[Rollout]) -> list[float]:
    return [member.reward for member in group]


def _centred(group: Sequence[Rollout]) -> list[float]:
    mean = statistics.fmean(_rewards(group))
    return [reward - mean for reward in _rewards(group)]


def _scale(group: Sequence[Rollout]) -> tuple[float, float]:
    """Mean and deviation of all step rewards of a group."""
    steps = [step.reward for member in group for step in member.step_rewards]
    return (statistics.fmean(steps), statistics.pstdev(steps)) if steps else (0.0, 0.0)


def _to_go(member: Rollout, mean: float, std: float, epsilon: float) -> list[float]:
    advantages = [0.0] * len(member.turn.token_ids)
    for step in member.step_rewards:
        advantages[step.index] += (step.reward - mean) / (std + epsilon)
    for index in reversed(range(len(advantages) - 1)):
        advantages[index] += advantages[index + 1]
    return advantages


def _to_teacher(member: Rollout, weight: float, offset: float) -> list[float]:
    if member.teacher_logprobs is None:
        raise ValueError(f"{member.rollout_id} has no teacher_logprobs: no teacher has scored it")
    pairs = zip(member.teacher_logprobs, member.turn.logprobs, strict=True)
    return [weight * (teacher - ours) + offset for teacher, ours in pairs]
