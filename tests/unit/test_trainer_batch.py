"""Advantages and batches."""

from __future__ import annotations

import pytest
import torch
from rollout_samples import make_rollout

from inflight.config import GateConfig
from inflight.rollout.gate import gate_group
from inflight.trainer.advantage import group_relative
from inflight.trainer.batch import collate
from inflight.types import RolloutGroup


def test_advantages_are_relative_to_the_mean():
    assert group_relative([1.0, 0.0, 0.0, 1.0], scale_by_std=False) == [0.5, -0.5, -0.5, 0.5]


def test_advantages_by_std():
    got = group_relative([1.0, 0.0, 0.0, 1.0], scale_by_std=True)
    assert got == pytest.approx([1.0, -1.0, -1.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_equal_rewards_teach_nothing(scale_by_std):
    assert group_relative([0.7, 0.7, 0.7], scale_by_std=scale_by_std) == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


def group(*members):
    return RolloutGroup(group_id="g", prompt_key="k", rollouts=list(members))


def gated(*members, version=4, **gate):
    got = gate_group(group(*members), version, GateConfig(**gate))
    assert got.dropped is None
    return got


def test_every_field_of_a_batch():
    short = make_rollout(index=0, spans=((0, 3), (1, 4)), length=2, reward=1.0, logprobs=[-0.1, -0.2])
    long = make_rollout(index=1, spans=((0, 4),), length=4, reward=0.0)
    batch = collate([gated(short, long)], scale_by_std=False, pad_id=99)
    # prompts are [7, 8, 9], completions 0, 1, ...
    assert batch.input_ids.tolist() == [[7, 8, 9, 0, 1, 99, 99], [7, 8, 9, 0, 1, 2, 3]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]]
    assert torch.equal(batch.trained_mask, batch.completion_mask)
    assert batch.versions.tolist() == [[-1, -1, -1, 3, 4, -1, -1], [-1, -1, -1, 4, 4, 4, 4]]
    assert batch.lags.tolist() == [[-1, -1, -1, 1, 0, -1, -1], [-1, -1, -1, 0, 0, 0, 0]]
    assert batch.behaviour_logprobs[0].tolist() == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0])
    assert batch.advantages.tolist() == [0.5, -0.5]
    assert batch.lag_counts() == {0: 5, 1: 1}
    assert (batch.trained_tokens, batch.completion_tokens) == (6, 6)


def test_old_tokens_are_context_but_not_trained_on():
    aged = make_rollout(index=0, spans=((0, 0), (2, 4)), length=6)
    fresh = make_rollout(index=1, spans=((0, 4),), length=6)
    batch = collate([gated(aged, fresh, max_token_lag=2)], scale_by_std=False)
    assert batch.completion_mask[0].sum() == 6
    assert batch.trained_mask[0].int().tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.completion_tokens - batch.trained_tokens == 2


def test_a_dropped_member_still_counts_for_the_baseline():
    members = [
        make_rollout(index=0, spans=((0, 4),), reward=1.0),
        make_rollout(index=1, spans=((0, 4),), reward=0.0),
        make_rollout(index=2, spans=((0, 0),), reward=0.5 - 0.9),
    ]
    batch = collate([gated(*members, max_token_lag=2)], scale_by_std=False)
    assert batch.advantages.tolist() == pytest.approx([0.8, -0.2])


def test_micro_batches_hold_every_sequence_once_and_waste_no_columns():
    members = [make_rollout(index=i, spans=((0, 4),), length=n, reward=float(i)) for i, n in enumerate((2, 9, 4, 7, 3))]
    batch = collate([gated(*members)], scale_by_std=False)
    parts = batch.micro_batches(2)
    assert [part.input_ids.shape for part in parts] == [(2, 12), (2, 7), (1, 5)]
    assert sorted(a for part in parts for a in part.advantages.tolist()) == sorted(batch.advantages.tolist())
    assert sum(part.trained_tokens for part in parts) == batch.trained_tokens


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="no sequences"):
        collate([], scale_by_std=False)


def test_a_sequence_without_a_prompt_is_refused():
    import msgspec

    members = [msgspec.structs.replace(make_rollout(index=i, spans=((0, 4),)), prompt_ids=[]) for i in range(2)]
    with pytest.raises(ValueError, match="g/0 has no prompt"):
        collate([gated(*members)], scale_by_std=False)
