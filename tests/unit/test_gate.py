"""The gate: masks by lag alone, drops with a reason, loses no member."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import make_group, make_rollout

from inflight.config import ConfigError, GateConfig, load, save
from inflight.launcher.compose import compose
from inflight.rollout.gate import GatedGroup, GatedRollout, GroupDrop, SequenceDrop, gate_group, rules_of
from inflight.rollout.rules import RULES, drop_members
from inflight.types import RolloutGroup, versions_of_tokens


def gate_rollout(rollout, version, config):
    """The verdict on one sequence, taken from a group of two of it."""
    group = RolloutGroup(group_id=rollout.group_id, prompt_key="k", rollouts=[rollout, rollout])
    gated = gate_group(group, version, config)
    return gated.rollouts[0] if gated.rollouts else next(iter(gated.members_dropped))


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
    elif verdict == SequenceDrop.EMPTY:
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
        assert gated.dropped == "fewer than 2 usable rollouts"
        assert usable < 2
        assert gated.rollouts == []
    assert gated.rewards == [each.reward for each in group.rollouts]


@settings(deadline=None)
@given(groups(), st.integers(0, 19), configs)
def test_a_group_is_dropped_when_and_only_when_a_token_is_from_the_future(group, version, config):
    future = any(span.version > version for each in group.rollouts for span in each.turn.token_versions)
    assert (gate_group(group, version, config).dropped == GroupDrop.UNPUBLISHED) == future


def test_the_limits_themselves_are_allowed():
    rollout = make_rollout(spans=[(0, 0), (3, 5)], length=4)
    assert gate_rollout(rollout, 8, GateConfig(max_token_lag=8)).mask == [True] * 4
    at_nine = gate_rollout(rollout, 9, GateConfig(max_token_lag=8, min_trained_share=0.25))
    assert at_nine.mask == [False, False, False, True]
    assert at_nine.lags == [9, 9, 9, 4]
    assert gate_rollout(rollout, 9, GateConfig(max_token_lag=8, min_trained_share=0.26)) is SequenceDrop.STALE


def test_no_share_lets_a_fully_masked_sequence_through():
    assert gate_rollout(make_rollout(), 9, GateConfig(min_trained_share=0.0)) == SequenceDrop.STALE


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
    assert gated.dropped == "fewer than 2 usable rollouts"
    assert gated.members_dropped == {SequenceDrop.STALE: 1, SequenceDrop.EMPTY: 1}


def test_spans_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="does not fit"):
        gate_group(make_group(spans=[(0, 0), (9, 1)], length=6), 9, GateConfig())


# --- further rules -----------------------------------------------------------------------------------------------


def members(*spans, rewards=None):
    """A group of sequences of four tokens, one for each list of spans."""
    rewards = rewards or [float(index) for index in range(len(spans))]
    made = [make_rollout(index=i, spans=each, length=4, reward=rewards[i]) for i, each in enumerate(spans)]
    return RolloutGroup(group_id="g", prompt_key="k", rollouts=made)


def gate(group, version, *rules, **config):
    return gate_group(group, version, GateConfig(rules=list(rules), **config))


def kept(gated):
    return [each.rollout.rollout_id for each in gated.rollouts]


FRESH, MIXED, OLD = [(0, 9)], [(0, 5), (2, 9)], [(0, 6)]
"""Lags at version 9: 0; 4, 4, 0, 0; 3."""


def test_whole_sequences_are_rejected_by_their_oldest_token():
    gated = gate(members(FRESH, MIXED, OLD), 9, {"name": "oldest_lag", "at_most": 3})
    assert kept(gated) == ["g/0", "g/2"]
    assert gated.members_dropped == {SequenceDrop.OLDEST: 1}


def test_and_by_their_mean_lag():
    gated = gate(members(FRESH, MIXED, OLD), 9, {"name": "mean_lag", "at_most": 2.5})
    assert kept(gated) == ["g/0", "g/1"]
    assert gated.members_dropped == {SequenceDrop.MEAN: 1}


def test_and_by_the_share_that_is_masked():
    rules = [{"name": "token_lag", "at_most": 3}, {"name": "trained_share", "at_least": 0.6}]
    gated = gate(members(FRESH, MIXED, OLD), 9, *rules)
    assert kept(gated) == ["g/0", "g/2"]
    assert gated.masked == {"too old": 2}, "masked before the member was dropped"
    assert kept(gate(members(FRESH, MIXED, OLD), 9, rules[0])) == ["g/0", "g/1", "g/2"]


def test_sequences_that_were_cut_off_by_length_are_left_out_and_counted():
    """For no reason of age: the group is not sampled again for it. Their rewards count for the baseline."""
    group = members(FRESH, MIXED, FRESH)
    first = group.rollouts[0]
    cut = msgspec.structs.replace(first, turn=msgspec.structs.replace(first.turn, finish_reason="length"))
    group = msgspec.structs.replace(group, rollouts=[cut, *group.rollouts[1:]])
    gated = gate(group, 9, {"name": "truncated"})
    assert kept(gated) == ["g/1", "g/2"]
    assert gated.masked == {"cut off by length": 4}
    assert gated.members_dropped == {"cut off by length": 1}
    assert gated.rewards == [0.0, 1.0, 2.0]
    both = msgspec.structs.replace(group, rollouts=[cut, msgspec.structs.replace(cut, rollout_id="g/1")])
    gated = gate(both, 9, {"name": "truncated"})
    assert gated.dropped == "fewer than 2 usable rollouts"
    assert not gated.stale


def test_what_is_masked_stays_masked():
    gated = gate(members(FRESH, MIXED, FRESH), 9, {"name": "token_lag", "at_most": 100}, max_token_lag=3)
    assert gated.rollouts[1].mask == [False, False, True, True]
    assert gated.masked == {"too old": 2}


def test_rules_combine_in_their_order():
    old, whole = {"name": "oldest_lag", "at_most": 3}, {"name": "whole_group"}
    assert gate(members(FRESH, MIXED, OLD), 9, whole, old).dropped is None
    gated = gate(members(FRESH, MIXED, OLD), 9, old, whole)
    assert gated.dropped == GroupDrop.INCOMPLETE
    assert gated.members_dropped == {SequenceDrop.OLDEST: 1}


def test_part_of_a_group_is_kept_from_a_size_on():
    old = {"name": "oldest_lag", "at_most": 3}
    assert gate(members(FRESH, MIXED, OLD), 9, old, {"name": "smallest_group", "at_least": 2}).dropped is None
    gated = gate(members(FRESH, MIXED, OLD), 9, old, {"name": "smallest_group", "at_least": 3})
    assert gated.dropped == "fewer than 3 usable rollouts"


def test_groups_that_teach_nothing_are_left_out():
    rule = {"name": "uniform_rewards"}
    assert gate(members(FRESH, OLD, rewards=[0.5, 0.5]), 9, rule).dropped == GroupDrop.UNIFORM
    assert gate(members(FRESH, OLD, rewards=[0.5, 0.6]), 9, rule).dropped is None
    assert gate(members(FRESH, OLD, rewards=[0.5, 0.6]), 9, rule | {"tolerance": 0.2}).dropped == GroupDrop.UNIFORM


def test_without_a_gate_everything_is_trained_on():
    gated = gate(members(FRESH, MIXED, OLD), 90, max_token_lag=10**6, min_trained_share=0.0)
    assert [each.mask for each in gated.rollouts] == [[True] * 4] * 3
    assert gated.masked == {}


def only_rich(group: GatedGroup, *, above: float = 0.5) -> GatedGroup:
    """All that a user has to write: it stands in this one file."""
    return drop_members(group, lambda member: member.rollout.reward <= above, "poor")


def test_a_users_rule_is_one_function():
    gated = gate(members(FRESH, OLD, FRESH), 9, {"name": "test_gate:only_rich"})
    assert kept(gated) == ["g/1", "g/2"]
    assert gated.members_dropped == {"poor": 1}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"name": "newest"}, r"gate.rules\[0\].name='newest' is not known: token_lag"),
        ({"name": "oldest_lag"}, r"gate.rules\[0\].at_most is missing"),
        ({"name": "oldest_lag", "limit": 1}, r"gate.rules\[0\].limit is not an option: at_most"),
        ({"name": "uniform_rewards", "tolerance": "x"}, "it takes float"),
        ({"at_most": 1}, "a rule has a name"),
    ],
)
def test_rules_that_do_not_exist_are_named(rule, words):
    with pytest.raises(ConfigError, match=words):
        rules_of(GateConfig(rules=[rule]))


def test_rules_come_from_the_configuration(tmp_path):
    text = "gate.rules=[{name: oldest_lag, at_most: 2},{name: whole_group}]"
    made = compose("tiny", [text, f"run_dir={tmp_path}"])
    save(made)
    assert load(tmp_path).gate == made.gate
    assert len(rules_of(load(tmp_path).gate)) == 2


def test_every_built_in_rule_can_be_found():
    from inflight.named import find

    assert all(callable(find(name, RULES, "test")) for name in RULES)
