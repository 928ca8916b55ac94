"""The buffer over the real bus: grants, acknowledgements, waiting, losing actors and closing."""

import threading
import time

import pytest
from rollout_samples import make_config, make_group

from inflight.bus import Link, Listener
from inflight.messages import ActorHello, Finish, Grant, GroupAck, GroupDone, GroupFailed, Refused
from inflight.rollout.buffer import ROLLOUTS_FILE, Buffer, BufferClosed
from inflight.rollout.stream import Reader


class Party:
    """A listener with a buffer, and links that play the actors."""

    def __init__(self, tmp_path, **kwargs):
        self.config = make_config(tmp_path, **kwargs)
        self.endpoint = f"ipc://{tmp_path}/b"
        self.listener = Listener(self.endpoint, self.config.bus)
        self.buffer = Buffer(self.listener, self.config)
        self.links = []

    def actor(self, name="a0", hello=True):
        link = Link(self.endpoint, name, self.config.bus)
        self.links.append(link)
        if hello:
            link.send(ActorHello(actor=name))
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


def expect(link, kind, timeout_s=20.0):
    message = link.receive(timeout_s)
    assert isinstance(message, kind), message
    return message


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.01)


def done(group_id, **kwargs):
    return GroupDone(group=make_group(group_id, **kwargs))


def test_a_group_from_grant_to_batch(party, tmp_path):
    room = party(keep=True)
    actor = room.actor()
    assert expect(actor, Grant) == Grant(groups=2)
    actor.send(done("x"))
    assert expect(actor, GroupAck) == GroupAck(group_id="x")
    assert expect(actor, Grant) == Grant(groups=3), "capacity 4, concurrency 2: a slot is left"
    actor.send(done("y"))
    assert expect(actor, GroupAck) == GroupAck(group_id="y")
    assert expect(actor, Grant) == Grant(groups=4)
    batch = room.buffer.take(2, version=0, timeout_s=5)
    assert [gated.group.group_id for gated in batch] == ["x", "y"]
    assert batch[0].version == 0
    assert batch[0].rollouts[0].mask == [True] * 6
    counts = room.buffer.counts()
    counts.check()
    assert (counts.granted, counts.in_flight, counts.trained, counts.buffered) == (4, 2, 2, 0)
    assert list(Reader(tmp_path / ROLLOUTS_FILE)) == [make_group("x"), make_group("y")]


def test_taking_frees_slots_when_the_buffer_is_full(party):
    room = party(max_lag=0, step=1)
    actor = room.actor()
    assert expect(actor, Grant) == Grant(groups=1)
    actor.send(done("x"))
    expect(actor, GroupAck)
    assert actor.receive(0.3) is None, "no slot is free"
    room.buffer.take(1, version=0, timeout_s=5)
    assert expect(actor, Grant) == Grant(groups=2)


def test_take_waits_and_goes_on_past_what_the_gate_drops(party):
    room = party(max_token_lag=0)
    actor = room.actor()
    expect(actor, Grant)
    got = []
    taker = threading.Thread(target=lambda: got.extend(room.buffer.take(2, version=3, timeout_s=10)))
    taker.start()
    for name, version in (("old", 2), ("new", 3), ("future", 4), ("newer", 3)):
        actor.send(done(name, spans=[(0, version)]))
        until(lambda name=name: _acked(actor, name))
    taker.join(timeout=5)
    assert [gated.group.group_id for gated in got] == ["new", "newer"]
    counts = room.buffer.counts()
    assert counts.dropped == {"fewer than 2 usable rollouts": 1, "version not published": 1}
    counts.check()


def _acked(link, group_id):
    return link.receive(0.2) == GroupAck(group_id=group_id)


def test_repeats_are_acknowledged_but_count_once(party, tmp_path):
    room = party(keep=True)
    actor = room.actor()
    expect(actor, Grant)
    for message in (done("x"), done("x"), GroupFailed(group_id="x", reason="late"), done("x")):
        actor.send(message)
    acks = [message for message in iter(lambda: actor.receive(0.5), None) if isinstance(message, GroupAck)]
    assert acks == [GroupAck(group_id="x")] * 4
    counts = room.buffer.counts()
    assert (counts.produced, counts.failed, counts.ignored) == (1, {}, {"repeat": 3})
    assert len(list(Reader(tmp_path / ROLLOUTS_FILE))) == 1


def test_failures_and_malformed_groups_are_counted_acknowledged_and_replaced(party, tmp_path):
    room = party(keep=True)
    actor = room.actor()
    expect(actor, Grant)
    actor.send(GroupFailed(group_id="x", reason="reward timeout"))
    assert expect(actor, GroupAck).group_id == "x"
    assert expect(actor, Grant) == Grant(groups=3)
    actor.send(done("y", logprobs=[0.0]))
    assert expect(actor, GroupAck).group_id == "y"
    assert expect(actor, Grant) == Grant(groups=4)
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
    actor.send(done("x"))
    actor.send(GroupFailed(group_id="y", reason="http"))
    until(lambda: room.buffer.counts().failed)
    with pytest.raises(TimeoutError, match=r"1 of 2 groups buffered, 2 in flight.*a0 \(2 in flight.*'http': 1"):
        room.buffer.take(2, version=0, timeout_s=0.05)
    actor.send(done("z"))
    assert [gated.group.group_id for gated in room.buffer.take(2, version=0, timeout_s=5)] == ["x", "z"]


def test_a_lost_actors_slots_go_to_the_living(party):
    room = party(max_lag=0, step=2, dead_after_s=2.0)
    dying = room.actor("a0")
    expect(dying, Grant)
    living = room.actor("a1")
    assert living.receive(0.3) is None
    dying.close()
    assert expect(living, Grant) == Grant(groups=2)
    counts = room.buffer.counts()
    assert counts.failed == {"actor lost": 2}
    counts.check()


def test_a_restarted_actor_starts_a_new_account(party):
    room = party()
    first = room.actor("a0")
    assert expect(first, Grant) == Grant(groups=2)
    first.send(done("x"))
    expect(first, GroupAck)
    first.close()
    second = room.actor("a0")
    assert expect(second, Grant) == Grant(groups=2)
    counts = room.buffer.counts()
    assert (counts.failed, counts.buffered, counts.in_flight) == ({"actor lost": 2}, 1, 2)
    counts.check()


def test_an_actor_without_hello_is_refused(party):
    room = party()
    actor = room.actor(hello=False)
    actor.send(done("x"))
    assert "start it again" in expect(actor, Refused).reason
    counts = room.buffer.counts()
    assert (counts.produced, counts.ignored) == (0, {"from a lost or unknown actor": 1})


def test_finish_reaches_everybody_and_waits_for_the_last_group(party):
    room = party()
    actor = room.actor()
    expect(actor, Grant)
    answers = []
    finisher = threading.Thread(target=lambda: answers.append(room.buffer.finish("done", timeout_s=10)))
    finisher.start()
    assert expect(actor, Finish) == Finish(reason="done")
    actor.send(done("x"))
    expect(actor, GroupAck)
    assert answers == []
    actor.send(GroupFailed(group_id="y", reason="run finished"))
    finisher.join(timeout=5)
    assert answers == [True]
    late = room.actor("a1")
    assert expect(late, Finish) == Finish(reason="done")
    assert late.receive(0.3) is None, "nothing is granted after the end"
    with pytest.raises(BufferClosed):
        room.buffer.take(2, version=0, timeout_s=5)
    room.buffer.counts().check()


def test_finish_does_not_wait_for_ever(party):
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
    taker.join(timeout=5)
    assert len(caught) == 1


def test_a_broken_disk_stops_the_run_instead_of_losing_rollouts(party, monkeypatch):
    room = party(keep=True)
    actor = room.actor()
    expect(actor, Grant)

    def full(group):
        raise OSError("no space left")

    monkeypatch.setattr(room.buffer._writer, "append", full)
    actor.send(done("x"))
    with pytest.raises(BufferClosed, match="no space left"):
        room.buffer.take(2, version=0, timeout_s=10)
    assert actor.receive(0.3) is None, "what was not written is not acknowledged"


def test_more_than_the_capacity_can_never_come(party):
    with pytest.raises(ValueError, match="capacity is 4"):
        party().buffer.take(5, version=0, timeout_s=1)
