"""The gate: masks by lag alone, drops with a reason, loses no member."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import make_group, make_rollout

from inflight.config import GateConfig
from inflight.rollout.gate import GatedRollout, GroupDrop, SequenceDrop, gate_group, gate_rollout
from inflight.types import RolloutGroup, versions_of_tokens

configs = st.builds(GateConfig, max_lag=st.just(4), max_token_lag=st.integers(0, 12), min_trained_share=st.floats(0, 1))


@st.composite
def rollouts(draw, group_id="g", index=0, newest=20):
    length = draw(st.integers(0, 30))
    starts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5))) if length > 1 else []
    versions = sorted(draw(st.lists(st.integers(0, newest), min_size=len(starts) + 1, max_size=len(starts) + 1)))
    spans = list(zip([0, *starts], versions, strict=True)) if length else []
    return make_rollout(group_id, index, spans, length, reward=draw(st.floats(0, 1)))


@st.composite
def groups(draw, newest=20):
    members = [draw(rollouts(index=index, newest=newest)) for index in range(draw(st.integers(1, 8)))]
    return RolloutGroup(group_id="g", prompt_key="k", rollouts=members)


@settings(deadline=None)
@given(rollouts(), st.integers(20, 40), configs)
def test_a_token_is_masked_by_its_lag_and_by_nothing_else(rollout, version, config):
    versions = versions_of_tokens(rollout.turn.token_versions, len(rollout.turn.token_ids))
    expected = [version - each <= config.max_token_lag for each in versions]
    verdict = gate_rollout(rollout, version, config)
    if isinstance(verdict, GatedRollout):
        assert verdict.mask == expected
        assert verdict.lags == [version - each for each in versions]
        assert verdict.rollout is rollout
        assert any(verdict.mask)
        assert sum(expected) / len(expected) >= config.min_trained_share
    elif verdict is SequenceDrop.EMPTY:
        assert versions == []
    else:
        assert not any(expected) or sum(expected) / len(expected) < config.min_trained_share


@settings(deadline=None)
@given(groups(), st.integers(20, 40), configs)
def test_every_member_is_trained_or_counted(group, version, config):
    gated = gate_group(group, version, config)
    usable = len(group.rollouts) - sum(gated.members_dropped.values())
    if gated.dropped is None:
        assert usable == len(gated.rollouts) >= 2
        assert [each.rollout.rollout_id for each in gated.rollouts] == [
            each.rollout_id for each in group.rollouts if isinstance(gate_rollout(each, version, config), GatedRollout)
        ]
    else:
        assert gated.dropped is GroupDrop.SMALL
        assert usable < 2
        assert gated.rollouts == []
    assert gated.rewards == [each.reward for each in group.rollouts]


@settings(deadline=None)
@given(groups(), st.integers(0, 19), configs)
def test_a_group_is_dropped_when_and_only_when_a_token_is_from_the_future(group, version, config):
    future = any(span.version > version for each in group.rollouts for span in each.turn.token_versions)
    assert (gate_group(group, version, config).dropped is GroupDrop.UNPUBLISHED) == future


def test_the_limits_themselves_are_allowed():
    rollout = make_rollout(spans=[(0, 0), (3, 5)], length=4)
    assert gate_rollout(rollout, 8, GateConfig(max_token_lag=8)).mask == [True] * 4
    at_nine = gate_rollout(rollout, 9, GateConfig(max_token_lag=8, min_trained_share=0.25))
    assert at_nine.mask == [False, False, False, True]
    assert at_nine.lags == [9, 9, 9, 4]
    assert gate_rollout(rollout, 9, GateConfig(max_token_lag=8, min_trained_share=0.26)) is SequenceDrop.STALE


def test_no_share_lets_a_fully_masked_sequence_through():
    assert gate_rollout(make_rollout(), 9, GateConfig(min_trained_share=0.0)) is SequenceDrop.STALE


def test_the_baseline_counts_dropped_members():
    members = [
        make_rollout(index=0, reward=0.1),
        make_rollout(index=1, reward=0.2, spans=[(0, 9)]),
        make_rollout(index=2, reward=0.3, spans=[(0, 9)]),
    ]
    gated = gate_group(RolloutGroup(group_id="g", prompt_key="k", rollouts=members), 9, GateConfig())
    assert gated.rewards == [0.1, 0.2, 0.3]
    assert [each.rollout.reward for each in gated.rollouts] == [0.2, 0.3]
    assert gated.members_dropped == {SequenceDrop.STALE: 1}


def test_one_usable_member_is_no_group():
    members = [make_rollout(index=0), make_rollout(index=1, spans=[(0, 9)]), make_rollout(index=2, length=0, spans=[])]
    gated = gate_group(RolloutGroup(group_id="g", prompt_key="k", rollouts=members), 9, GateConfig())
    assert gated.dropped is GroupDrop.SMALL
    assert gated.members_dropped == {SequenceDrop.STALE: 1, SequenceDrop.EMPTY: 1}


def test_spans_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="does not fit"):
        gate_group(make_group(spans=[(0, 0), (9, 1)], length=6), 9, GateConfig())
