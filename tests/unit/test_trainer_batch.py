"""Advantages and batches."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from rollout_samples import make_group, make_rollout

from inflight.config import GateConfig
from inflight.named import find
from inflight.rollout.gate import gate_group
from inflight.trainer.advantage import (
    ADVANTAGES,
    distillation,
    group_mean,
    group_std,
    process,
    reinforce_pp,
    rloo,
)
from inflight.trainer.batch import collate
from inflight.types import RolloutGroup, RoutedExperts, StepReward


def rewarded(*rewards):
    return [make_rollout(index=i, reward=each) for i, each in enumerate(rewards)]


def test_advantages_are_relative_to_the_mean():
    assert group_mean([rewarded(1.0, 0.0, 0.0, 1.0), rewarded(1.0, 0.0)]) == [[0.5, -0.5, -0.5, 0.5], [0.5, -0.5]]


def test_advantages_by_std():
    assert group_std([rewarded(1.0, 0.0, 0.0, 1.0)])[0] == pytest.approx([1.0, -1.0, -1.0, 1.0], rel=1e-5)


def test_leave_one_out():
    rewards = [1.0, 0.0, 0.0, 0.5]
    expected = [own - (sum(rewards) - own) / 3 for own in rewards]
    assert rloo([rewarded(*rewards)])[0] == pytest.approx(expected)
    assert rloo([rewarded(1.0)]) == [[0.0]]


@pytest.mark.parametrize("baseline", [True, False])
def test_global_normalisation(baseline):
    groups = [[1.0, 0.0, 0.0], [0.9, 0.7, 0.2]]
    raw = [r - (sum(g) / 3 if baseline else 0.0) for g in groups for r in g]
    mean = sum(raw) / 6
    std = (sum((x - mean) ** 2 for x in raw) / 6) ** 0.5
    got = reinforce_pp([rewarded(*each) for each in groups], baseline=baseline)
    assert [x for each in got for x in each] == pytest.approx([(x - mean) / (std + 1e-6) for x in raw])


@pytest.mark.parametrize("advantage", [group_mean, group_std, rloo, reinforce_pp])
def test_equal_rewards_teach_nothing(advantage):
    assert advantage([rewarded(0.7, 0.7, 0.7)])[0] == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


def with_steps(index, *steps, length=4):
    return replace(make_rollout(index=index, length=length), step_rewards=[StepReward(*each) for each in steps])


def test_process_rewards_count_for_the_tokens_before_them():
    """Step rewards 1, 0, 0.5 of the group: mean 0.5, deviation sqrt(1/6)."""
    got = process([[with_steps(0, (1, 1.0), (3, 0.0)), with_steps(1, (2, 0.5)), with_steps(2)]])[0]
    unit = 0.5 / ((1 / 6) ** 0.5 + 1e-6)
    assert got[0] == pytest.approx([0.0, 0.0, -unit, -unit], abs=1e-9)
    assert got[1] == pytest.approx([0.0] * 4, abs=1e-9)
    assert got[2] == [0.0] * 4


def test_missing_process_rewards_are_an_error():
    with pytest.raises(ValueError, match=r"trainer.advantage.name=process: no rollout of the step has step rewards"):
        process([make_group(size=4).rollouts, make_group("h", size=4).rollouts])


def test_a_teacher_is_worth_what_it_finds_more_likely():
    members = [
        replace(make_rollout(index=0, length=2, reward=1.0, logprobs=[-1.0, -2.0]), teacher_logprobs=[-0.5, -3.0]),
        replace(make_rollout(index=1, length=1, reward=0.0, logprobs=[-1.0]), teacher_logprobs=[-1.0]),
    ]
    assert distillation([members], weight=2.0, outcome=1.0) == [[[1.5, -1.5], [-0.5]]]
    with pytest.raises(ValueError, match="g/0 has no teacher_logprobs"):
        distillation([[make_rollout()]])


def test_every_advantage_can_be_found():
    for name in ADVANTAGES:
        assert callable(find(name, ADVANTAGES, "test"))


def batch_of(*groups, advantage=group_mean, normalise="token", max_tokens=16, **more):
    return collate(groups, advantage=advantage, normalise=normalise, max_tokens=max_tokens, **more)


def group(*members):
    return RolloutGroup(group_id="g", prompt_key="k", rollouts=list(members))


def gated(*members, version=4, **gate):
    got = gate_group(group(*members), version, GateConfig(**gate))
    assert got.dropped is None
    return got


def test_every_field_of_a_batch():
    short = make_rollout(index=0, spans=((0, 3), (1, 4)), length=2, reward=1.0, logprobs=[-0.1, -0.2])
    long = make_rollout(index=1, spans=((0, 4),), length=4, reward=0.0)
    batch = batch_of(gated(short, long), pad_id=99)
    # prompts are [7, 8, 9], completions 0, 1, ...
    assert batch.input_ids.tolist() == [[7, 8, 9, 0, 1, 99, 99], [7, 8, 9, 0, 1, 2, 3]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]]
    assert torch.equal(batch.trained_mask, batch.completion_mask)
    assert batch.versions.tolist() == [[-1, -1, -1, 3, 4, -1, -1], [-1, -1, -1, 4, 4, 4, 4]]
    assert batch.lags.tolist() == [[-1, -1, -1, 1, 0, -1, -1], [-1, -1, -1, 0, 0, 0, 0]]
    assert batch.behaviour_logprobs[0].tolist() == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0])
    assert batch.advantages.tolist() == [[0, 0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, -0.5, -0.5, -0.5, -0.5]]
    assert (batch.proximal_logprobs, batch.teacher_logprobs, batch.kept, batch.routed_experts) == (None,) * 4
    assert batch.lag_counts() == {0: 5, 1: 1}
    assert (int(batch.trained_mask.sum()), batch.completion_tokens) == (6, 6)


def test_old_tokens_are_context_but_not_trained_on():
    aged = make_rollout(index=0, spans=((0, 0), (2, 4)), length=6)
    fresh = make_rollout(index=1, spans=((0, 4),), length=6)
    batch = batch_of(gated(aged, fresh, max_token_lag=2))
    assert batch.completion_mask[0].sum() == 6
    assert batch.trained_mask[0].int().tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.completion_tokens - int(batch.trained_mask.sum()) == 2


def test_a_dropped_member_still_counts_for_the_baseline():
    members = [
        make_rollout(index=0, spans=((0, 4),), reward=1.0),
        make_rollout(index=1, spans=((0, 4),), reward=0.0),
        make_rollout(index=2, spans=((0, 0),), reward=0.5 - 0.9),
    ]
    batch = batch_of(gated(*members, max_token_lag=2))
    assert batch.advantages[:, -1].tolist() == pytest.approx([0.8, -0.2])


def test_micro_batches_hold_every_sequence_once_and_waste_no_columns():
    members = [make_rollout(index=i, spans=((0, 4),), length=n, reward=float(i)) for i, n in enumerate((2, 9, 4, 7, 3))]
    batch = batch_of(gated(*members))
    parts = [batch.rows(rows) for rows in batch.cut(2)]
    assert [part.input_ids.shape for part in parts] == [(2, 12), (2, 7), (1, 5)]
    assert sorted(a for part in parts for a in part.advantages[:, 3].tolist()) == sorted(
        batch.advantages[:, 3].tolist()
    )
    assert sorted(s for part in parts for s in part.scales.tolist()) == sorted(batch.scales.tolist())
    assert sum(int(part.trained_mask.sum()) for part in parts) == int(batch.trained_mask.sum())


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="no sequences"):
        batch_of()


def test_an_advantage_that_does_not_fit_the_groups_is_named():
    members = [make_rollout(index=i, spans=((0, 4),)) for i in range(2)]
    for short in ([[1.0]], []):
        with pytest.raises(ValueError, match=r"trainer.advantage gives .* the groups have \[2\] members"):
            batch_of(gated(*members), advantage=lambda groups, short=short: short)


def test_a_sequence_without_a_prompt_is_refused():
    members = [replace(make_rollout(index=i, spans=((0, 4),)), prompt_ids=[]) for i in range(2)]
    with pytest.raises(ValueError, match="g/0 has no prompt"):
        batch_of(gated(*members))


@pytest.mark.parametrize(
    ("normalise", "wanted"), [("token", [1 / 6, 1 / 6]), ("sequence", [1 / 8, 1 / 4]), ("constant", [1 / 20, 1 / 20])]
)
def test_what_a_token_weighs(normalise, wanted):
    """Four and two trained tokens; two more are masked."""
    fresh = make_rollout(index=0, spans=((0, 4),), length=4)
    aged = make_rollout(index=1, spans=((0, 0), (2, 4)), length=4)
    batch = batch_of(gated(fresh, aged, max_token_lag=2), normalise=normalise, max_tokens=10)
    assert batch.scales.tolist() == pytest.approx(wanted)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(ValueError, match="token, sequence, constant"):
        batch_of(gated(*rewarded(0, 1)), normalise="mean")


def test_what_was_recorded_beside_the_tokens():
    first = make_rollout(index=0, length=2, kept=[[0, 5], []], spans=((0, 4),))
    experts = RoutedExperts(shape=(4, 2, 1), bytes_each=2, data=bytes([1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 0, 1]))
    second = replace(make_rollout(index=1, length=3, spans=((0, 4),)), teacher_logprobs=[-1.0, -2.0, -3.0])
    second = replace(second, turn=replace(second.turn, routed_experts=experts))
    batch = batch_of(gated(first, second))
    assert batch.kept[0].tolist() == [[-1, -1]] * 3 + [[0, 5], [-1, -1], [-1, -1]]
    assert (batch.kept[1] == -1).all()
    assert batch.routed_experts.shape == (2, 6, 2, 1)
    assert batch.routed_experts[1, :, :, 0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 256], [-1, -1], [-1, -1]]
    assert (batch.routed_experts[0] == -1).all()
    assert batch.teacher_logprobs is None, "one sequence was not scored"
    both = batch_of(gated(replace(first, teacher_logprobs=[-0.5, -0.25]), second))
    assert both.teacher_logprobs.tolist() == [[0, 0, 0, -0.5, -0.25, 0], [0, 0, 0, -1.0, -2.0, -3.0]]
    short = [both.rows(rows) for rows in both.cut(1)][1]
    assert short.kept.shape == (1, 5, 2)
    assert short.routed_experts.shape == (1, 5, 2, 1)


def test_routed_experts_of_different_shapes_are_refused():
    members = [
        make_rollout(
            index=i,
            spans=((0, 4),),
            length=2,
            routed_experts=RoutedExperts(shape=(1, i + 1, 1), bytes_each=1, data=bytes(i + 1)),
        )
        for i in range(2)
    ]
    with pytest.raises(ValueError, match="different shapes"):
        batch_of(gated(*members))
    with pytest.raises(ValueError, match="3 bytes are not"):
        RoutedExperts(shape=(1, 2, 2), bytes_each=1, data=bytes(3))
