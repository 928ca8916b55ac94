"""The buffer's books under any order of events: capacity, exactly once, and every group counted somewhere."""

import dataclasses

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_samples import make_config, make_group, make_rollout

from inflight.groups import attempt_of, defect, group_id, index_of
from inflight.messages import GroupDone, GroupFailed
from inflight.messages.reasons import ACTOR_LOST
from inflight.rollout import counters
from inflight.rollout.gate_result import GroupDrop
from inflight.rollout.ledger import MAX_TRIES, UNDELIVERED, Ledger
from inflight.rollout.questions import Indices, Questions
from inflight.rollout.restore import newest_version
from inflight.rollout.waiting import StoredGroup
from inflight.types import RolloutGroup, RoutedExperts, StepReward

ACTORS = st.sampled_from(["a0", "a1", "a2"])


class Books(RuleBasedStateMachine):
    """Actors come, go, deliver, repeat and misbehave while a trainer takes batches, is killed and resumes."""

    def __init__(self):
        super().__init__()
        self.config = make_config("unused", max_lag=2, step=2, concurrency=3, max_token_lag=2, steps=12)
        self.ledger = Ledger(self.config)
        self.started: dict[str, list[int]] = {}
        self.sent: list[tuple[str, object]] = []
        self.trained: list[str] = []
        self.kept = (self.ledger.books(), 0, 0)
        """What a checkpoint holds, the version, and how many were trained."""
        self.written: list[StoredGroup] = []
        self.version = 0
        self.most = 24
        """Groups that all steps take."""

    def name_of(self, index):
        """Of the group that answers a question now."""
        return group_id(index, self.ledger.attempts([index]).get(index, 0))

    def grant(self):
        for actor, questions in self.ledger.grants().items():
            assert not set(questions) & {index for started in self.started.values() for index in started}
            self.started[actor] += questions

    @rule(actor=ACTORS, same=st.booleans())
    def hello(self, actor, same):
        again = same and actor in self.started
        before = self.ledger.counts()
        self.ledger.hello(actor, "a" if again else f"{len(self.sent)}")
        if not again:
            self.started[actor] = []
            self.ledger.hello(actor, "a")
        self.ledger.hello(actor, "a")
        assert not again or self.ledger.counts() == before
        self.grant()

    @rule(actor=ACTORS)
    def lose(self, actor):
        self.started.pop(actor, None)
        self.ledger.leave(actor, ACTOR_LOST)
        self.grant()

    @precondition(lambda self: any(self.started.values()))
    @rule(data=st.data(), kind=st.sampled_from(["good", "good", "good", "fail", "again", "malformed", "future"]))
    def deliver(self, data, kind):
        actor = data.draw(st.sampled_from([name for name, started in self.started.items() if started]))
        started = self.started[actor]
        name = self.name_of(started.pop(data.draw(st.integers(0, len(started) - 1))))
        version = self.version + 1 if kind == "future" else data.draw(st.integers(0, self.version))
        group = make_group(name, spans=[(0, version)], logprobs=[-1.0] * (5 if kind == "malformed" else 6))
        message = GroupDone(group=group)
        if kind in ("fail", "again"):
            message = GroupFailed(group_id=name, reason="reward", again=kind == "again")
        kept = self.ledger.settle(actor, message)
        assert (kept is not None) == (kind in ("good", "future"))
        if kept is not None:
            self.written.append(kept)
        self.sent.append((actor, message))
        self.grant()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data):
        """Late, twice or from another actor: a whole group may count, all else changes nothing."""
        actor, message = data.draw(st.sampled_from(self.sent))
        in_flight = [self.name_of(index) for started in self.started.values() for index in started]
        if isinstance(message, GroupFailed) and index_of(message.group_id) in self.started.get(actor, []):
            return  # that would be news
        if isinstance(message, GroupDone) and message.group.group_id in in_flight:
            return  # so would that
        before = self.ledger.counts()
        kept = self.ledger.settle(actor, message)
        if kept is None:
            assert sum(self.ledger.counts().ignored.values()) == sum(before.ignored.values()) + 1
        else:
            self.written.append(kept)
        self.grant()

    @rule(wanted=st.integers(1, 4), checkpoint=st.booleans())
    def take(self, wanted, checkpoint):
        usable = []
        self.ledger.judge(usable, wanted, self.version, self.config.gate)
        if len(usable) == wanted:
            self.ledger.train(usable)
            self.trained += [gated.group.group_id for gated in usable]
            self.version += 1
            if checkpoint:
                self.kept = (self.ledger.books(), self.version, len(self.trained))
        self.grant()

    @rule()
    def die_and_go_on(self):
        books, self.version, trained = self.kept
        del self.trained[trained:]
        self.written = [group for group in self.written if newest_version(group.group()) <= self.version]
        later = {group.name for group in self.written if attempt_of(group.name) > books.too_old.get(group.index, 0)}
        self.written = [group for group in self.written if group.name not in later or group.index in books.settled]
        current = [group for group in self.written if attempt_of(group.name) == books.too_old.get(group.index, 0)]
        waiting = [group for group in current if group.index not in books.settled]
        self.most = trained + 2 * (12 - self.version)
        checkpoint = f"step-{self.version:06d}" if self.version else ""
        self.ledger = Ledger(dataclasses.replace(self.config, checkpoint=checkpoint), books, waiting)
        self.started, self.sent = {}, []

    @invariant()
    def everything_is_counted(self):
        counts = self.ledger.counts()
        counts.check()
        assert counts.in_flight == sum(map(len, self.started.values()))
        assert counts.trained == len(self.trained)
        assert counts.trained + counts.in_flight + counts.buffered <= self.most or not counts.in_flight

    @invariant()
    def every_question_is_somewhere_once(self):
        """Settled, buffered, in flight or re-queued: none is skipped."""
        questions = self.ledger._questions
        held = [group.index for group in self.ledger._queue]
        placed = held + [index for started in self.started.values() for index in started] + questions._open
        placed += self.ledger._questions._suspects._open
        placed += [index for index in range(questions._next) if index in questions.settled]
        assert sorted(placed) == list(range(questions._next))

    @invariant()
    def nothing_is_trained_twice(self):
        assert len(set(map(index_of, self.trained))) == len(self.trained)
        settled = self.ledger.books().settled
        assert all(index_of(name) in settled for name in self.trained)

    @invariant()
    def a_question_is_too_old_a_bounded_number_of_times(self):
        books = self.ledger.books()
        assert max(books.too_old.values(), default=0) <= self.config.gate.stale_retries
        assert not [index for index in books.too_old if index in books.settled]

    @invariant()
    def no_slot_lies_idle(self):
        counts = self.ledger.counts()
        waiting = self.ledger._questions._suspects.waiting  # each has its place in what is left
        room = min(self.ledger.capacity, 24 - counts.trained - waiting) - counts.in_flight - counts.buffered
        deaths = self.ledger._questions._suspects._deaths
        alone = [index for index in deaths if deaths[index] > 1 and index not in self.ledger._queue]
        if room > 0 and not alone:  # one that is to be asked alone keeps its actor free for it
            assert all(groups == self.config.rollout.concurrency for groups in self.ledger.in_flight.values())


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def done(group_id, **kwargs):
    return GroupDone(group=make_group(group_id, **kwargs))


def failed(name, reason="r", again=False):
    return GroupFailed(group_id=name, reason=reason, again=again)


def test_slots_are_shared_out_evenly():
    ledger = Ledger(make_config("unused", max_lag=0, step=5, concurrency=4))
    ledger.hello("a0", "x")
    assert ledger.grants() == {"a0": [0, 1, 2, 3]}, "never more than an actor works on at once"
    ledger.hello("a1", "x")
    assert ledger.grants() == {"a1": [4]}
    ledger.settle("a0", failed("q2"))
    assert ledger.grants() == {"a1": [5]}, "the actor with the fewest in flight comes first"


def test_the_queue_is_first_in_first_out_and_an_early_end_loses_nothing():
    config = make_config("unused", max_lag=1, step=2, concurrency=4, on_stale="drop")
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    ledger.grants()
    for name, version in (("q3", 9), ("q0", 0), ("q1", 9), ("q2", 9)):
        ledger.settle("a0", done(name, spans=[(0, version)]))
    usable = []
    ledger.judge(usable, 4, 9, config.gate)
    assert [gated.group.group_id for gated in usable] == ["q3", "q1", "q2"]
    assert ledger.counts().buffered == 3
    usable = []
    ledger.judge(usable, 2, 9, config.gate)
    ledger.train(usable)
    counts = ledger.counts()
    assert [gated.group.group_id for gated in usable] == ["q3", "q1"]
    assert (counts.trained, counts.buffered, counts.dropped) == (2, 1, {"fewer than 2 usable rollouts": 1})
    assert counts.rollouts_dropped == {"too few fresh tokens": 2}
    counts.check()
    books = ledger.books()
    assert (books.settled_below, books.settled_beyond) == (2, [3]), "0 was dropped, 1 and 3 trained on, 2 waits"


def test_what_would_not_be_trained_on_is_not_asked():
    config = make_config("unused", max_lag=3, step=2, concurrency=9, steps=3)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    assert ledger.grants() == {"a0": [0, 1, 2, 3, 4, 5]}, "three steps of two, though the capacity is 8"
    ledger.settle("a0", failed("q1"))
    assert ledger.grants() == {"a0": [6]}, "another takes the place of one that will not come"


@pytest.mark.parametrize("step", [1, 2, 8])
def test_a_run_resumed_with_other_steps_requests_what_these_need(step):
    config = make_config("unused", step=step, max_lag=2, concurrency=64, steps=6)
    books = Ledger(config).books()
    books = msgspec.structs.replace(books, settled_below=6, trained=6)  # three steps of two groups
    ledger = Ledger(dataclasses.replace(config, checkpoint="step-000003"), books)
    ledger.hello("a0", "i")
    asked = []
    while told := ledger.grants():
        asked += told["a0"]
        for index in told["a0"]:
            assert ledger.settle("a0", GroupDone(group=make_group(group_id(index), spans=[(0, 3)])))
        while ledger.counts().buffered >= step:
            usable = []
            ledger.judge(usable, step, 3, config.gate)
            ledger.train(usable)
    assert asked == list(range(6, 6 + 3 * step))
    assert ledger.counts().buffered == 0


def test_a_group_that_was_never_granted_changes_nothing():
    ledger = Ledger(make_config("unused", max_lag=0, step=1))
    ledger.hello("a0", "x")
    for name in ("q7", "x", "q01", "q-1"):
        assert ledger.settle("a0", done(name)) is None
    assert ledger.counts().ignored == {"not granted": 4}
    assert ledger.grants() == {"a0": [0]}


def test_a_late_group_of_a_lost_actor_is_welcome_once():
    """Whether its question is re-queued or another actor works on it: the first answer counts."""
    ledger = Ledger(make_config("unused", max_lag=0, step=2, concurrency=1))
    ledger.hello("a0", "x")
    ledger.hello("a1", "x")
    assert ledger.grants() == {"a0": [0], "a1": [1]}
    ledger.leave("a0", ACTOR_LOST)
    assert ledger.settle("a0", failed("q0")) is None
    assert ledger.settle("a0", done("q0")) is not None
    ledger.leave("a1", ACTOR_LOST)
    ledger.hello("a2", "x")
    assert ledger.grants() == {"a2": [1]}
    assert ledger.settle("a1", done("q1")) is not None
    assert ledger.settle("a2", done("q1")) is None
    counts = ledger.counts()
    counts.check()
    assert (counts.buffered, counts.in_flight, counts.failed) == (2, 0, {ACTOR_LOST: 2})
    assert counts.ignored == {"not granted": 1, "repeat": 1}


def test_a_question_is_requeued_when_a_generator_was_at_fault_but_not_forever():
    ledger = Ledger(make_config("unused", max_lag=0, step=1))
    ledger.hello("a0", "x")
    for _ in range(MAX_TRIES):
        assert ledger.grants() == {"a0": [0]}
        ledger.settle("a0", failed("q0", "connection lost", again=True))
    assert ledger.grants() == {"a0": [1]}
    assert ledger.counts().failed == {"connection lost": MAX_TRIES}
    ledger.leave("a0", ACTOR_LOST)
    ledger.hello("a0", "y")
    assert ledger.grants() == {"a0": [1]}, "a lost actor is no fault of the question"
    ledger.settle("a0", failed("q1", "reward timeout"))
    assert ledger.grants() == {"a0": [2]}


def test_the_state_continues_where_it_was():
    config = make_config("unused", max_lag=1, step=2, concurrency=4)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    ledger.grants()
    groups = [ledger.settle("a0", done(name)) for name in ("q2", "q0", "q3")]
    usable = []
    ledger.judge(usable, 1, 0, config.gate)
    ledger.train(usable)
    ledger.settle("a0", failed("q1"))
    after = Ledger(config, ledger.books(), groups[1:])
    counts = after.counts()
    counts.check()
    assert (counts.trained, counts.buffered, counts.failed, counts.granted) == (1, 2, {"r": 1}, 4)
    after.hello("a0", "x")
    assert after.grants() == {"a0": [4, 5]}
    assert after.settle("a0", done("q2")) is None, "it was trained on"


def test_indices_stay_small():
    indices = Indices()
    for index in (1, 2, 0, 5, 3, 3, 0):
        indices.add(index)
    assert (indices.below, indices.beyond) == (4, [5])
    assert [index for index in range(7) if index in indices] == [0, 1, 2, 3, 5]
    assert Indices(2, [0, 2, 7]).below == 3
    questions = Questions(Indices(2, [4]), held=[6])
    assert [questions.take({"a0": []}, 1, 9)[1] for _ in range(4)] == [2, 3, 5, 7]
    questions.give_back(3)
    assert not questions.claim(2)
    assert questions.claim(3)
    assert questions.take({"a0": []}, 1, 9) == ("a0", 8)


def test_closing_counts_what_never_came():
    ledger = Ledger(make_config("unused"))
    ledger.hello("a0", "x")
    ledger.grants()
    ledger.close()
    assert ledger.counts().failed == {UNDELIVERED: 2}
    ledger.counts().check()


def test_reasons_are_bounded(monkeypatch):
    monkeypatch.setattr(counters, "MAX_REASONS", 2)
    ledger = Ledger(make_config("unused", concurrency=4))
    ledger.hello("a0", "x")
    ledger.grants()
    for number in range(4):
        ledger.settle("a0", failed(f"q{number}", f"reason {number}"))
    assert ledger.counts().failed == {"reason 0": 1, "reason 1": 1, "other": 2}


def test_training_out_of_order_is_refused():
    config = make_config("unused")
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    ledger.grants()
    ledger.settle("a0", done("q0"))
    ledger.settle("a0", done("q1"))
    usable = []
    ledger.judge(usable, 2, 0, config.gate)
    with pytest.raises(RuntimeError, match="q1 is not where it was in the buffer: q0 is"):
        ledger.train(usable[1:])


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({}, None),
        ({"size": 3}, "malformed: group size"),
        ({"logprobs": [-1.0] * 5}, "malformed: logprobs"),
        ({"logprobs": [float("nan")] * 6}, "malformed: logprobs"),
        ({"reward": float("inf")}, "malformed: reward"),
        ({"reward": -1e39}, "malformed: reward"),
        ({"logprobs": [-1e39] + [-1.0] * 5}, "malformed: logprobs"),
        ({"token_versions": []}, "malformed: versions"),
        ({"spans": [(0, 0), (6, 1)]}, "malformed: versions"),
        ({"spans": [(1, 0)]}, "malformed: versions"),
        ({"length": 0, "spans": []}, None),
    ],
)
def test_defects_are_named(kwargs, reason):
    assert defect(make_group(**kwargs), 2, 99) == reason


def test_defects_between_members_are_named():
    from msgspec.structs import replace

    group = make_group()
    first, second = group.rollouts
    assert defect(replace(group, rollouts=[first, first]), 2, 99) == "malformed: group size"
    assert defect(replace(group, group_id="other"), 2, 99) == "malformed: group id"
    other = replace(second, prompt_ids=[1])
    assert defect(replace(group, rollouts=[first, other]), 2, 99) == "malformed: prompts differ"


def test_what_the_model_can_not_embed_is_refused():
    """Else it would end the trainer, and again each run that resumes from the rollout file."""
    group = make_group()
    largest = max(max(*each.prompt_ids, *each.turn.token_ids) for each in group.rollouts)
    assert defect(group, 2, largest + 1) is None
    assert defect(group, 2, largest) == "malformed: token ids"
    first, second = group.rollouts
    kept = msgspec.structs.replace(second.turn, kept=[[1, 99]] * len(second.turn.token_ids))
    cut = msgspec.structs.replace(group, rollouts=[first, msgspec.structs.replace(second, turn=kept)])
    assert (defect(cut, 2, 100), defect(cut, 2, 99)) == (None, "malformed: token ids")
    empty = [msgspec.structs.replace(each, prompt_ids=[]) for each in group.rollouts]
    assert defect(msgspec.structs.replace(group, rollouts=empty), 2, 100) == "malformed: prompt"


def test_a_ledger_knows_the_vocabulary():
    ledger = Ledger(make_config("unused", max_lag=0, step=5, concurrency=4), vocabulary=2)
    ledger.hello("a0", "x")
    ledger.grants()
    assert ledger.settle("a0", done(group_id(0))) is None
    assert ledger.counts().failed == {"malformed: token ids": 1}


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
    assert defect(RolloutGroup(group_id="g", prompt_key="k", rollouts=sound), 2, 99) is None
    assert defect(RolloutGroup(group_id="g", prompt_key="k", rollouts=[sound[0], bad]), 2, 99) == "malformed: evidence"


def test_the_buffer_is_bounded_in_bytes_but_never_below_a_step():
    """Large groups: once they fill the buffer, no more are asked than the next step needs."""
    config = make_config("unused", max_lag=3, step=2, concurrency=9, buffer_mib=1.0)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    assert ledger.grants() == {"a0": list(range(8))}
    for index in range(3):
        ledger.settle("a0", done(group_id(index), length=27_000))
    ledger.leave("a0", ACTOR_LOST)
    ledger.hello("a0", "y")
    assert ledger.grants() == {}, "1.3 MB wait"
    usable = []
    ledger.judge(usable, 2, 0, config.gate)
    ledger.train(usable)
    assert ledger.grants() == {"a0": [3]}, "0.4 MB wait, and two like it are all that fits"
    full = Ledger(config, groups=[StoredGroup.of(make_group("q0", length=600_000))])
    full.hello("a0", "x")
    assert full.grants() == {"a0": [1]}, "one more makes a step, however large"


def test_the_reward_of_all_is_not_that_of_what_was_trained_on():
    """A rule on rewards leaves groups out: the mean over the batch alone is not the success rate."""
    config = make_config("unused", max_lag=5, step=1, concurrency=9)
    gate = dataclasses.replace(config.gate, rules=[{"name": "uniform_rewards"}])
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    ledger.grants()
    for index, rewards in enumerate([(0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 0.0)]):
        message = done(group_id(index))
        members = [
            msgspec.structs.replace(member, reward=reward)
            for member, reward in zip(message.group.rollouts, rewards, strict=True)
        ]
        ledger.settle("a0", GroupDone(group=msgspec.structs.replace(message.group, rollouts=members)))
    found = []
    for _ in range(2):
        usable = []
        ledger.judge(usable, 1, 0, gate)
        ledger.train(usable)
        found.append((usable[0].rewards, ledger.tally.of_batch))
    assert found == [([0.0, 1.0], [0.0, 0.0, 0.0, 1.0]), ([1.0, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0, 0.0])]
    assert ledger.tally.reasons() == dict.fromkeys(["q0", "q2", "q3"], "all rewards equal")
    assert ledger.tally.reasons() == {}, "each reason is reported once"


def answers(ledger, version, **kwargs):
    """All that is granted now is answered under `version`; the names of the groups."""
    names = []
    for actor, questions in ledger.grants().items():
        attempts = ledger.attempts(questions)
        for index in questions:
            names.append(group_id(index, attempts.get(index, 0)))
            assert ledger.settle(actor, done(names[-1], spans=[(0, version)], **kwargs)) is not None
    return names


def test_a_question_whose_answer_is_too_stale_is_requeued_a_bounded_number_of_times():
    """Under a name of its own each time, so that a late repeat of an older answer is not taken for the newer one."""
    config = make_config("unused", max_lag=0, step=1, max_token_lag=0, concurrency=1)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    usable = []
    for attempt, name in enumerate(["q0", "q0.1", "q0.2"]):
        assert answers(ledger, 0) == [name], "the lowest open question comes first"
        assert ledger.settle("a0", done(name)) is None
        ledger.judge(usable, 1, 1, config.gate)
        assert usable == []
        counts = ledger.counts()
        counts.check()
        retried = min(attempt + 1, 2)
        done_with = {"fewer than 2 usable rollouts": 1} if attempt == 2 else {}
        assert counts.dropped == {"too old, to be sampled again": retried} | done_with
        assert ledger.books().too_old == ({} if attempt == 2 else {0: retried})
        assert ledger.settle("a0", done(name)) is None, "it has arrived already"
        assert ledger.settle("a0", done("q0.7")) is None
    assert answers(ledger, 1) == ["q1"]
    ledger.judge(usable, 1, 1, config.gate)
    ledger.train(usable)
    assert ledger.books().settled_below == 2


def test_a_resumed_run_keeps_how_often_an_answer_was_too_stale():
    config = make_config("unused", max_lag=1, step=1, max_token_lag=0, concurrency=2)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    assert answers(ledger, 0) == ["q0", "q1"]
    ledger.judge([], 1, 1, config.gate)
    books = msgspec.json.decode(msgspec.json.encode(ledger.books()), type=type(ledger.books()))
    assert books == ledger.books()
    assert books.too_old == {0: 1, 1: 1}
    after = Ledger(config, books)
    after.counts().check()
    after.hello("a0", "x")
    assert answers(after, 1) == ["q0.1", "q1.1"]
    usable = []
    after.judge(usable, 2, 1, config.gate)
    after.train(usable)
    assert (after.books().settled_below, after.books().too_old) == (2, {})


@pytest.mark.parametrize(
    ("change", "reason"), [({"on_stale": "drop"}, "fewer than 2 usable rollouts"), ({"reward": 1.0}, GroupDrop.UNIFORM)]
)
def test_what_is_dropped_for_another_reason_or_by_choice_is_done_with(change, reason):
    config = make_config("unused", max_lag=0, step=1, max_token_lag=0)
    rules = [{"name": "uniform_rewards"}] if "reward" in change else []
    gate = dataclasses.replace(config.gate, rules=rules, on_stale=change.get("on_stale", "retry"))
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    assert answers(ledger, 0) == ["q0"]
    ledger.judge([], 1, 0 if rules else 1, gate)
    assert ledger.counts().dropped == {reason: 1}
    assert ledger.books().settled_below == 1


def test_on_policy_without_synchronous_steps_loses_no_question():
    """What is granted before a step is published is one version old when the next step takes it."""
    config = make_config("unused", max_lag=0, step=2, max_token_lag=0, concurrency=8, steps=20)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    trained = []
    for version in range(20):
        usable = []
        while len(usable) < 2:
            answers(ledger, version)
            ledger.judge(usable, 2, version, config.gate)
        ledger.train(usable)
        trained += [index_of(gated.group.group_id) for gated in usable]
        answers(ledger, version)  # before this version's successor is there
    assert trained == list(range(40))
    assert set(ledger.counts().dropped) == {"too old, to be sampled again"}


def test_groups_that_could_not_be_trained_on_are_replaced():
    config = make_config("unused", max_lag=0, step=2, concurrency=4, steps=1)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    assert answers(ledger, 0) == ["q0", "q1"]
    usable = []
    ledger.judge(usable, 2, 0, config.gate)
    ledger.train(usable)
    assert ledger.grants() == {}, "the run has but one step"
    ledger.reject(usable, GroupDrop.NOT_FINITE)
    assert ledger.tally.reasons() == dict.fromkeys(["q0", "q1"], "gradient not finite")
    counts = ledger.counts()
    counts.check()
    assert (counts.trained, counts.dropped) == (0, {"gradient not finite": 2})
    assert ledger.grants() == {"a0": [2, 3]}
    assert ledger.books().settled_below == 2, "they do not come again"


def die(ledger, number, actor="a0"):
    """An actor that joins, gets what it may have, and dies; what it had."""
    ledger.hello(actor, f"{number:016x}")
    granted = ledger.grants().get(actor, [])
    ledger.leave(actor, ACTOR_LOST)
    ledger.counts().check()
    return granted


def test_a_question_that_kills_its_actors_is_given_up_and_no_other():
    """Whichever it is, it takes three deaths; no question that was in flight with it is given up with it."""
    for poison in range(4):
        ledger = Ledger(make_config("unused", concurrency=4, max_lag=7, steps=40))
        deaths, answered = 0, set()
        for number in range(100):
            ledger.hello("a0", f"{number:016x}")
            ledger.grants()
            in_flight = ledger._accounts.held["a0"]
            if poison in in_flight:
                deaths += 1
                ledger.leave("a0", ACTOR_LOST)
            elif in_flight and len(answered) < 12:
                index = min(in_flight)
                assert ledger.settle("a0", GroupDone(group=make_group(group_id(index)))) is not None
                answered.add(index)
            ledger.counts().check()
        assert deaths == 3
        assert poison in ledger._questions.settled
        assert answered >= set(range(8)) - {poison}


def test_a_suspect_is_asked_alone_the_last_time():
    ledger = Ledger(make_config("unused", concurrency=3, max_lag=7))
    assert die(ledger, 1) == [0, 1, 2]
    assert die(ledger, 2) == [0, 3, 4], "one suspect, and such as have not been there"
    assert die(ledger, 3) == [0], "alone: it dies of itself"
    ledger.hello("a0", "f" * 16)
    assert ledger.grants() == {"a0": [1, 5, 6]}
    assert 0 in ledger._questions.settled
    assert ledger.counts().failed == {"actor lost": 7}


def test_an_outage_of_generators_is_no_try():
    ledger = Ledger(make_config("unused", concurrency=1))
    ledger.hello("a0", "0" * 16)
    for _ in range(3 * MAX_TRIES):
        assert ledger.grants() == {"a0": [0]}
        ledger.settle("a0", GroupFailed(group_id="q0", reason="no generator", again=True))
    assert ledger.counts().failed == {"no generator": 3 * MAX_TRIES}


def test_a_run_whose_actor_was_killed_trains_on_the_questions_of_an_undisturbed_one():
    ledger = Ledger(make_config("unused", concurrency=4, max_lag=3, step=2, steps=3))
    assert die(ledger, 1) == [0, 1, 2, 3]
    ledger.hello("a0", "f" * 16)
    asked = []
    while granted := ledger.grants().get("a0", []):
        asked += granted
        for index in granted:
            ledger.settle("a0", GroupDone(group=make_group(group_id(index))))
    assert sorted(asked) == list(range(6))
