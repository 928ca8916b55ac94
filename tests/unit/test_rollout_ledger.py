"""The buffer's books under any order of events: capacity, exactly once, and every group counted somewhere."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_samples import make_config, make_group, make_rollout

from inflight.messages import GroupDone, GroupFailed
from inflight.rollout import ledger as ledger_module
from inflight.rollout.ledger import ACTOR_LOST, ACTOR_STOPPED, UNDELIVERED, Ledger, defect
from inflight.types import RolloutGroup, RoutedExperts, StepReward

ACTORS = st.sampled_from(["a0", "a1", "a2"])


class Books(RuleBasedStateMachine):
    """Actors come, go, deliver, repeat and misbehave while a trainer takes batches."""

    def __init__(self):
        super().__init__()
        self.config = make_config("unused", max_lag=2, step=2, concurrency=3, max_token_lag=2)
        self.ledger = Ledger(self.config)
        self.started: dict[str, list[str]] = {}
        self.granted: dict[str, int] = {}
        self.sent: list[tuple[str, object]] = []
        self.trained: list[str] = []
        self.lost = 0
        self.version = 0
        self.number = 0

    def grant(self):
        for actor, cumulative in self.ledger.grants().items():
            for _ in range(cumulative - self.granted[actor]):
                self.number += 1
                self.started[actor].append(f"{actor}-{self.number}")
            self.granted[actor] = cumulative

    @rule(actor=ACTORS)
    def hello(self, actor):
        self.lost += len(self.started.get(actor, []))
        self.ledger.hello(actor)
        self.started[actor], self.granted[actor] = [], 0
        self.grant()

    @rule(actor=ACTORS)
    def lose(self, actor):
        self.lost += len(self.started.pop(actor, []))
        self.ledger.lost(actor)
        self.grant()

    @precondition(lambda self: any(self.started.values()))
    @rule(data=st.data(), kind=st.sampled_from(["good", "good", "good", "fail", "malformed", "future"]))
    def deliver(self, data, kind):
        actor = data.draw(st.sampled_from([name for name, started in self.started.items() if started]))
        started = self.started[actor]
        group_id = started.pop(data.draw(st.integers(0, len(started) - 1)))
        version = self.version + 1 if kind == "future" else data.draw(st.integers(0, self.version))
        group = make_group(group_id, spans=[(0, version)], logprobs=[-1.0] * (5 if kind == "malformed" else 6))
        message = GroupFailed(group_id=group_id, reason="reward") if kind == "fail" else GroupDone(group=group)
        kept = self.ledger.settle(actor, message)
        assert (kept is not None) == (kind in ("good", "future"))
        self.sent.append((actor, message))
        self.grant()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data):
        actor, message = data.draw(st.sampled_from(self.sent))
        if self.ledger.knows(actor):
            before = self.ledger.counts()
            assert self.ledger.settle(actor, message) is None
            assert self.ledger.counts().ignored["repeat"] == before.ignored.get("repeat", 0) + 1

    @rule(wanted=st.integers(1, 4))
    def take(self, wanted):
        usable = []
        self.ledger.judge(usable, wanted, self.version, self.config.gate)
        if len(usable) == wanted:
            self.ledger.train(usable)
            self.trained += [gated.group.group_id for gated in usable]
            self.version += 1
        self.grant()

    @invariant()
    def everything_is_counted(self):
        counts = self.ledger.counts()
        counts.check()
        assert counts.in_flight == sum(map(len, self.started.values()))
        assert counts.in_flight + counts.buffered <= self.ledger.capacity
        assert counts.granted == self.number
        assert counts.trained == len(self.trained)
        assert counts.failed.get(ACTOR_LOST, 0) == self.lost

    @invariant()
    def nothing_is_trained_twice(self):
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def no_slot_lies_idle(self):
        counts = self.ledger.counts()
        if counts.in_flight + counts.buffered < self.ledger.capacity:
            assert all(groups == self.config.rollout.concurrency for groups in self.ledger.in_flight.values())


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def done(group_id, **kwargs):
    return GroupDone(group=make_group(group_id, **kwargs))


def test_slots_are_shared_out_evenly():
    ledger = Ledger(make_config("unused", max_lag=0, step=5, concurrency=4))
    ledger.hello("a0")
    assert ledger.grants() == {"a0": 4}, "never more than an actor works on at once"
    ledger.hello("a1")
    assert ledger.grants() == {"a1": 1}
    ledger.settle("a0", GroupFailed(group_id="x", reason="r"))
    assert ledger.grants() == {"a1": 2}, "the actor with the fewest in flight comes first"


def test_the_queue_is_first_in_first_out_and_an_early_end_loses_nothing():
    config = make_config("unused", max_lag=1, step=2, concurrency=4)
    ledger = Ledger(config)
    ledger.hello("a0")
    ledger.grants()
    for name, version in (("x", 9), ("w", 0), ("y", 9), ("z", 9)):
        ledger.settle("a0", done(name, spans=[(0, version)]))
    usable = []
    ledger.judge(usable, 4, 9, config.gate)
    assert [gated.group.group_id for gated in usable] == ["x", "y", "z"]
    assert ledger.counts().buffered == 3
    usable = []
    ledger.judge(usable, 2, 9, config.gate)
    ledger.train(usable)
    counts = ledger.counts()
    assert [gated.group.group_id for gated in usable] == ["x", "y"]
    assert (counts.trained, counts.buffered, counts.dropped) == (2, 1, {"fewer than 2 usable rollouts": 1})
    assert counts.rollouts_dropped == {"too few fresh tokens": 2}
    counts.check()


def test_a_group_that_nobody_was_granted_changes_nothing():
    ledger = Ledger(make_config("unused", max_lag=0, step=1))
    ledger.hello("a0")
    ledger.hello("a1")
    assert ledger.grants() == {"a0": 1}
    assert ledger.settle("a1", done("x")) is None
    assert ledger.counts().ignored == {"not granted": 1}
    assert ledger.settle("a0", done("x")) is not None, "the id was not burnt"


def test_a_leaving_actor_is_granted_no_more():
    ledger = Ledger(make_config("unused"))
    ledger.hello("a0")
    assert ledger.grants() == {"a0": 2}
    ledger.settle("a0", GroupFailed(group_id="x", reason=ACTOR_STOPPED))
    assert ledger.grants() == {}
    assert ledger.counts().failed == {ACTOR_STOPPED: 1}


def test_a_farewell_counts_even_when_no_slot_is_held():
    ledger = Ledger(make_config("unused"))
    ledger.hello("a0")
    ledger.settle("a0", GroupFailed(group_id="x", reason=ACTOR_STOPPED))
    assert ledger.grants() == {}
    assert ledger.counts().ignored == {"not granted": 1}


def test_closing_counts_what_never_came():
    ledger = Ledger(make_config("unused"))
    ledger.hello("a0")
    ledger.grants()
    ledger.close()
    assert ledger.counts().failed == {UNDELIVERED: 2}
    ledger.counts().check()


def test_reasons_are_bounded(monkeypatch):
    monkeypatch.setattr(ledger_module, "MAX_REASONS", 2)
    ledger = Ledger(make_config("unused", concurrency=4))
    ledger.hello("a0")
    ledger.grants()
    for number in range(4):
        ledger.settle("a0", GroupFailed(group_id=f"g{number}", reason=f"reason {number}"))
    assert ledger.counts().failed == {"reason 0": 1, "reason 1": 1, "other": 2}


def test_training_out_of_order_is_refused():
    config = make_config("unused")
    ledger = Ledger(config)
    ledger.hello("a0")
    ledger.grants()
    ledger.settle("a0", done("x"))
    ledger.settle("a0", done("y"))
    usable = []
    ledger.judge(usable, 2, 0, config.gate)
    with pytest.raises(RuntimeError, match="not the oldest"):
        ledger.train(usable[1:])


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({}, None),
        ({"size": 3}, "malformed: group size"),
        ({"logprobs": [-1.0] * 5}, "malformed: logprobs"),
        ({"logprobs": [float("nan")] * 6}, "malformed: logprobs"),
        ({"reward": float("inf")}, "malformed: reward"),
        ({"token_versions": []}, "malformed: versions"),
        ({"spans": [(0, 0), (6, 1)]}, "malformed: versions"),
        ({"spans": [(1, 0)]}, "malformed: versions"),
        ({"length": 0, "spans": []}, None),
    ],
)
def test_defects_are_named(kwargs, reason):
    assert defect(make_group(**kwargs), 2) == reason


def test_defects_between_members_are_named():
    from msgspec.structs import replace

    group = make_group()
    first, second = group.rollouts
    assert defect(replace(group, rollouts=[first, first]), 2) == "malformed: group size"
    assert defect(replace(group, group_id="other"), 2) == "malformed: group id"
    assert defect(replace(group, rollouts=[first, replace(second, prompt_ids=[1])]), 2) == "malformed: prompts differ"


@pytest.mark.parametrize(
    "turn, rollout",
    [
        ({"kept": [[0]] * 5}, {}),
        ({"routed_experts": RoutedExperts(shape=(10, 1, 1), bytes_each=1, data=bytes(10))}, {}),
        ({}, {"step_rewards": [StepReward(6, 1.0)]}),
        ({}, {"step_rewards": [StepReward(0, float("nan"))]}),
        ({}, {"teacher_logprobs": [-1.0] * 5}),
        ({}, {"teacher_logprobs": [-1.0] * 5 + [float("-inf")]}),
    ],
)
def test_evidence_that_does_not_fit_the_tokens_is_refused(turn, rollout):
    """Six tokens after a prompt of three."""
    sound = [make_rollout(index=i) for i in range(2)]
    bad = msgspec.structs.replace(sound[1], turn=msgspec.structs.replace(sound[1].turn, **turn), **rollout)
    assert defect(RolloutGroup(group_id="g", prompt_key="k", rollouts=sound), 2) is None
    assert defect(RolloutGroup(group_id="g", prompt_key="k", rollouts=[sound[0], bad]), 2) == "malformed: evidence"
