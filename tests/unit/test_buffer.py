"""The buffer over the real bus: grants, acknowledgements, waiting, losing actors and closing."""

import dataclasses
import threading
import time

import pytest
from rollout_samples import make_config, make_group

from inflight.bus import Link, Listener
from inflight.config import GateConfig
from inflight.messages import ActorBye, ActorHello, Finish, Grant, GroupAck, GroupDone, GroupFailed, Routed
from inflight.rollout.buffer import ROLLOUTS_FILE, Buffer, BufferClosed
from inflight.rollout.stream import Reader


class ActorLink(Link):
    """Without the messages on where generators are, which are no matter of these tests."""

    def receive(self, timeout_s):
        message = super().receive(timeout_s)
        return self.receive(timeout_s) if isinstance(message, Routed) else message


class Party:
    """A listener with a buffer, and links that play the actors."""

    def __init__(self, tmp_path, gate=None, warn=None, **kwargs):
        self.config = make_config(tmp_path, **kwargs)
        if gate is not None:
            self.config = dataclasses.replace(self.config, gate=GateConfig(max_lag=1, **gate))
        self.endpoint = f"ipc://{tmp_path}/b"
        self.listener = Listener(self.endpoint, self.config.bus)
        self.buffer = Buffer(self.listener, self.config, **({"warn": warn} if warn else {}))
        self.links = []

    def actor(self, name="a0", incarnation="0" * 16):
        link = ActorLink(self.endpoint, name, self.config.bus)
        self.links.append(link)
        link.send(ActorHello(actor=name, incarnation=incarnation))
        return link

    def close(self):
        self.buffer.close()
        for link in self.links:
            link.close()
        self.listener.close()


@pytest.fixture
def party(tmp_path):
    parties = []

    def make(**kwargs):
        parties.append(Party(tmp_path, **kwargs))
        return parties[-1]

    yield make
    for each in parties:
        each.close()


def expect(link, kind, timeout_s=60.0):
    message = link.receive(timeout_s)
    assert isinstance(message, kind), message
    return message


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.01)


def done(group_id, **kwargs):
    return GroupDone(group=make_group(group_id, **kwargs))


def test_a_group_from_grant_to_batch(party, tmp_path):
    room = party(keep=True)
    actor = room.actor()
    assert expect(actor, Grant) == Grant(questions=[0, 1])
    actor.send(done("q0"))
    assert expect(actor, GroupAck) == GroupAck(group_id="q0")
    assert expect(actor, Grant) == Grant(questions=[2]), "capacity 4, concurrency 2: a slot is left"
    actor.send(done("q1"))
    assert expect(actor, GroupAck) == GroupAck(group_id="q1")
    assert expect(actor, Grant) == Grant(questions=[3])
    batch = room.buffer.take(2, version=0, timeout_s=20)
    assert [gated.group.group_id for gated in batch] == ["q0", "q1"]
    assert batch[0].version == 0
    assert batch[0].rollouts[0].mask == [True] * 6
    counts = room.buffer.counts()
    counts.check()
    assert (counts.granted, counts.in_flight, counts.trained, counts.buffered) == (4, 2, 2, 0)
    assert list(Reader(tmp_path / ROLLOUTS_FILE)) == [make_group("q0"), make_group("q1")]


def test_taking_frees_slots_when_the_buffer_is_full(party):
    room = party(max_lag=0, step=1)
    actor = room.actor()
    assert expect(actor, Grant) == Grant(questions=[0])
    actor.send(done("q0"))
    expect(actor, GroupAck)
    assert actor.receive(0.3) is None, "no slot is free"
    room.buffer.take(1, version=0, timeout_s=20)
    assert expect(actor, Grant) == Grant(questions=[1])


def test_take_waits_and_continues_past_groups_that_the_gate_drops(party):
    room = party(max_token_lag=0, on_stale="drop")
    actor = room.actor()
    expect(actor, Grant)
    got = []
    taker = threading.Thread(target=lambda: got.extend(room.buffer.take(2, version=3, timeout_s=20)))
    taker.start()
    for name, version in (("q0", 2), ("q1", 3), ("q2", 4), ("q3", 3)):
        actor.send(done(name, spans=[(0, version)]))
        until(lambda name=name: _acked(actor, name))
    taker.join(timeout=20)
    assert [gated.group.group_id for gated in got] == ["q1", "q3"]
    counts = room.buffer.counts()
    assert counts.dropped == {"fewer than 2 usable rollouts": 1, "version not published": 1}
    counts.check()


def _acked(link, group_id):
    return link.receive(0.2) == GroupAck(group_id=group_id)


def test_repeats_are_acknowledged_but_count_once(party, tmp_path):
    room = party(keep=True)
    actor = room.actor()
    expect(actor, Grant)
    for message in (done("q0"), done("q0"), GroupFailed(group_id="q0", reason="late", again=True), done("q0")):
        actor.send(message)
    acks = []
    while len(acks) < 4:
        if not isinstance(message := actor.receive(20), Grant):
            acks.append(message)
    assert acks == [GroupAck(group_id="q0")] * 4
    counts = room.buffer.counts()
    assert (counts.produced, counts.failed, counts.ignored) == (1, {}, {"repeat": 3})
    assert len(list(Reader(tmp_path / ROLLOUTS_FILE))) == 1


def test_failures_and_malformed_groups_are_counted_acknowledged_and_replaced(party, tmp_path):
    room = party(keep=True)
    actor = room.actor()
    expect(actor, Grant)
    actor.send(GroupFailed(group_id="q0", reason="reward timeout", again=False))
    assert expect(actor, GroupAck).group_id == "q0"
    assert expect(actor, Grant) == Grant(questions=[2])
    actor.send(done("q1", logprobs=[0.0]))
    assert expect(actor, GroupAck).group_id == "q1"
    assert expect(actor, Grant) == Grant(questions=[1]), "what arrived damaged is re-queued"
    counts = room.buffer.counts()
    assert counts.failed == {"reward timeout": 1, "malformed: logprobs": 1}
    counts.check()
    assert list(Reader(tmp_path / ROLLOUTS_FILE)) == []


def test_a_timeout_says_what_is_missing_and_loses_nothing(party):
    room = party()
    with pytest.raises(TimeoutError, match="actors alive: none"):
        room.buffer.take(2, version=0, timeout_s=0.05)
    actor = room.actor()
    expect(actor, Grant)
    actor.send(done("q0"))
    actor.send(GroupFailed(group_id="q1", reason="http", again=False))
    until(lambda: room.buffer.counts().failed)
    with pytest.raises(TimeoutError, match=r"1 of 2 groups buffered, 2 in flight.*a0 \(2 in flight.*'http': 1"):
        room.buffer.take(2, version=0, timeout_s=0.05)
    actor.send(done("q2"))
    assert [gated.group.group_id for gated in room.buffer.take(2, version=0, timeout_s=20)] == ["q0", "q2"]


def test_a_lost_actors_slots_go_to_the_living(party):
    room = party(max_lag=0, step=2, dead_after_s=2.0)
    dying = room.actor("a0")
    expect(dying, Grant)
    living = room.actor("a1")
    assert living.receive(0.3) is None
    dying.close()
    assert expect(living, Grant) == Grant(questions=[0, 2]), "of what died with an actor, one at a time"
    counts = room.buffer.counts()
    assert counts.failed == {"actor lost": 2}
    counts.check()


def test_a_restarted_actor_starts_a_new_account(party):
    room = party()
    first = room.actor("a0")
    assert expect(first, Grant) == Grant(questions=[0, 1])
    first.send(done("q0"))
    expect(first, GroupAck)
    first.close()
    second = room.actor("a0", incarnation="1" * 16)
    assert expect(second, Grant) == Grant(questions=[1, 3]), "1 and 2 died with it: one at a time"
    counts = room.buffer.counts()
    assert (counts.failed, counts.buffered, counts.in_flight) == ({"actor lost": 2}, 1, 2)
    counts.check()


def test_a_hello_again_changes_nothing(party):
    room = party()
    actor = room.actor()
    expect(actor, Grant)
    actor.send(ActorHello(actor="a0", incarnation="0" * 16))
    assert actor.receive(0.3) is None
    assert room.buffer.counts().failed == {}


def test_an_actor_that_was_presumed_dead_delivers_and_rejoins(party):
    """As after SIGSTOP: what it finished meanwhile counts, and its next hello brings it back."""
    room = party(dead_after_s=2.0)
    actor = room.actor()
    expect(actor, Grant)
    with room.buffer._changed:
        room.buffer._ledger.leave("a0", "actor lost")
    actor.send(done("q0"))
    assert expect(actor, GroupAck).group_id == "q0"
    assert actor.receive(0.2) is None
    actor.send(ActorHello(actor="a0", incarnation="0" * 16))
    assert expect(actor, Grant) == Grant(questions=[1, 2])
    counts = room.buffer.counts()
    counts.check()
    assert (counts.buffered, counts.failed) == (1, {"actor lost": 2})


def test_what_a_leaving_actor_had_goes_to_the_others(party):
    room = party(max_lag=0, step=2)
    leaving = room.actor("a0")
    expect(leaving, Grant)  # both questions: which of two hellos comes first is not said
    living = room.actor("a1")
    leaving.send(done("q1"))
    leaving.send(ActorBye(reason="actor stopped"))
    assert expect(living, Grant) == Grant(questions=[0])
    counts = room.buffer.counts()
    counts.check()
    assert (counts.failed, counts.buffered) == ({"actor stopped": 1}, 1)


def test_finish_reaches_everybody_and_waits_for_the_last_group(party):
    room = party()
    actor = room.actor()
    expect(actor, Grant)
    answers = []
    finisher = threading.Thread(target=lambda: answers.append(room.buffer.finish("done", timeout_s=20)))
    finisher.start()
    assert expect(actor, Finish) == Finish(reason="done")
    actor.send(done("q0"))
    expect(actor, GroupAck)
    assert answers == []
    actor.send(ActorBye(reason="run finished"))
    finisher.join(timeout=20)
    assert answers == [True]
    late = room.actor("a1")
    assert expect(late, Finish) == Finish(reason="done")
    assert late.receive(0.3) is None, "nothing is granted after the end"
    with pytest.raises(BufferClosed):
        room.buffer.take(2, version=0, timeout_s=20)
    room.buffer.counts().check()


def test_finish_does_not_wait_forever(party):
    room = party()
    expect(room.actor(), Grant)
    assert room.buffer.finish("done", timeout_s=0.05) is False
    room.buffer.close()
    assert room.buffer.counts().failed == {"not delivered before the buffer closed": 2}
    room.buffer.counts().check()


def test_closing_wakes_a_waiting_trainer(party):
    room = party()
    caught = []

    def take():
        try:
            room.buffer.take(2, version=0, timeout_s=60)
        except BufferClosed as error:
            caught.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    room.buffer.close()
    taker.join(timeout=20)
    assert len(caught) == 1


def test_a_broken_disk_stops_the_run_instead_of_losing_rollouts(party, monkeypatch):
    room = party(keep=True)
    actor = room.actor()
    expect(actor, Grant)

    def full(group):
        raise OSError("no space left")

    monkeypatch.setattr(room.buffer._writer, "append_frame", full)
    actor.send(done("q0"))
    with pytest.raises(BufferClosed, match="no space left"):
        room.buffer.take(2, version=0, timeout_s=20)
    assert actor.receive(0.3) is None, "what was not written is not acknowledged"


def test_more_than_the_capacity_can_never_come(party):
    with pytest.raises(ValueError, match="capacity is 4"):
        party().buffer.take(5, version=0, timeout_s=1)


@pytest.mark.parametrize(
    ("gate", "version", "says"),
    [
        ({"rules": [{"name": "uniform_rewards"}]}, 0, "all rewards equal: 16), by gate.rules[0] (uniform_rewards): 16"),
        (
            {"max_token_lag": 0, "min_trained_share": 1.0, "on_stale": "drop"},
            3,
            "fewer than 2 usable rollouts: 16), by gate.max_token_lag=0: 16, gate.min_trained_share=1: 16, "
            "at least 2 rollouts: 16; rollouts excluded from them: too few fresh tokens: 32",
        ),
        ({}, -1, "version not published: 16)"),
    ],
)
def test_a_gate_that_drops_everything_is_reported_after_a_bounded_number_of_groups(party, gate, version, says):
    """Once, not once a group; what ends the run in the end says it too."""
    warned = []
    room = party(step=8, concurrency=8, gate=gate, warn=warned.append)
    actor, answered = room.actor(), 0
    takers = [threading.Thread(target=wait_in_vain, args=[room.buffer, version])]
    takers[0].start()
    while answered < 30:
        message = actor.receive(0.1)
        for index in message.questions[: 30 - answered] if isinstance(message, Grant) else ():
            answered += 1
            actor.send(done(f"q{index}"))
    until(lambda: sum(room.buffer.counts().dropped.values()) == 30)
    assert warned == [f"the gate drops everything: 16 groups dropped in a row ({says}"]
    room.buffer.finish("enough", 0.0)
    takers[0].join(20)
    room.buffer._actors._finish = None
    with pytest.raises(TimeoutError, match=r"30 groups dropped in a row \("):
        room.buffer.take(8, version, timeout_s=0.0)


def wait_in_vain(buffer, version):
    with pytest.raises(BufferClosed):
        buffer.take(8, version, timeout_s=60)
