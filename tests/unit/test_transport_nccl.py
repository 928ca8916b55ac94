"""The order of what a NCCL transport does, without NCCL: communicators are made of lists here."""

import importlib
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch
from fake_generator import eventually
from transports import kill, stop, store_elsewhere, without_cuda

from inflight.messages import BucketMeta
from inflight.weights.transport import timeout
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.gloo import GlooSender
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.scatter import CopyRegion, ScatterTarget


class Event:
    """One that is done."""

    def __init__(self, blocking=False):
        pass

    def record(self, stream):
        pass

    def synchronize(self):
        pass


class Never:
    """An event that does not come."""

    def query(self):
        return False


class FakeGroup:
    """Notes what it is asked for; its first broadcast, which forms it, can be delayed, as by a rank that is stopped."""

    made: ClassVar[list["FakeGroup"]] = []
    let_go: ClassVar[threading.Event | None] = None

    def __init__(self, store, rank, size, options):
        self.broadcasts = 0
        self.aborted = threading.Event()
        FakeGroup.made.append(self)

    def broadcast(self, tensors, how):
        self.broadcasts += 1
        if FakeGroup.let_go is not None:
            assert FakeGroup.let_go.wait(20)
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        return SimpleNamespace(block_current_stream=lambda: None)

    def abort(self):
        self.aborted.set()


FakeGroup.Options = SimpleNamespace


@pytest.fixture
def nccl(monkeypatch):
    with without_cuda(monkeypatch, "nccl", "communicator") as nccl:
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeGroup, raising=False)
        monkeypatch.setattr(FakeGroup, "made", [])
        monkeypatch.setattr(FakeGroup, "let_go", None)
        monkeypatch.setattr(nccl.cuda, "bind", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        yield nccl


def store(timeout_s=5.0):
    """The trainer's, where rank 1 is there."""
    made = KeyValueStore("", 5.0)
    made.put("here/1", b"")
    made.timeout_s = timeout_s
    return made


@pytest.fixture
def communicator(nccl):
    """The module beneath."""
    return importlib.import_module("inflight.weights.transport.communicator")


@pytest.fixture
def group(communicator):
    return communicator.Communicator(store(), 0, 2)


@pytest.fixture
def lonely(nccl, monkeypatch):
    """Stands in for communicators; the class notes what each was asked for."""
    asked = []

    class Lonely(FakeGroup):
        def __init__(self, store, rank, size, options):
            super().__init__(store, rank, size, options)
            asked.append((rank, size))

        def allreduce(self, tensors):
            asked.append([tensor.device for tensor in tensors])
            return SimpleNamespace(block_current_stream=lambda: asked.append("waited"))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Lonely, raising=False)
    monkeypatch.setattr(nccl.cuda, "bind", lambda device: asked.append(f"bound to {device}"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(asked.append(stream)))
    return asked


def test_kernels_are_loaded_once_by_a_communicator_of_one_that_is_gone_afterwards(communicator, lonely):
    for _ in range(2):  # a rank joins again where its trainer was started again: it decodes then
        communicator.load_kernels(torch.device("cpu"), 5.0)
    assert lonely == ["bound to cpu", "stream of cpu", (0, 1), [torch.device("cpu")], "waited"]
    assert [made.aborted.is_set() for made in FakeGroup.made] == [True]


def test_a_device_that_nccl_cant_use_is_named(communicator, lonely, monkeypatch):
    def fails(*_):
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(torch.distributed.ProcessGroupNCCL, "allreduce", fails)
    with pytest.raises(TransportError, match=r"open: NCCL can't be used on cpu: no kernel image is available$"):
        communicator.load_kernels(torch.device("cpu"), 5.0)


def test_kernels_that_do_not_load_in_time_keep_no_rank_from_hearing_of_more(communicator, lonely, monkeypatch):
    let_go, before = threading.Event(), dict(os.environ)

    def held_up(self, _):
        assert let_go.wait(20)
        return SimpleNamespace(block_current_stream=lambda: None)

    monkeypatch.setattr(torch.distributed.ProcessGroupNCCL, "allreduce", held_up)
    with pytest.raises(TransportError, match=r"open: NCCL can't be used on cpu: no answer within 0\.2 s"):
        communicator.load_kernels(torch.device("cpu"), 0.2)
    assert dict(os.environ) == before, "what the engine makes meanwhile is made as ever"
    let_go.set()
    assert FakeGroup.made[0].aborted.wait(10)


@pytest.mark.parametrize("own", [None, "0"])
def test_a_communicators_settings_are_those_of_the_moment_that_it_is_made(communicator, lonely, monkeypatch, own):
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(name, own)
    made = torch.distributed.ProcessGroupNCCL.__init__
    monkeypatch.setattr(
        torch.distributed.ProcessGroupNCCL, "__init__", lambda *args: (seen.append(os.environ[name]), made(*args))[1]
    )
    communicator.load_kernels(torch.device("cpu"), 5.0)
    assert (seen, os.environ.get(name)) == (["1"], own), "torch's watchdog looks at none"


def test_two_communicators_made_at_a_time_leave_nothing_in_the_environment(communicator, monkeypatch):
    """As those with two generators. Left there, the setting would make the waits of the trainer's own groups block."""
    name, seen, left = "TORCH_NCCL_BLOCKING_WAIT", [], threading.Event()
    monkeypatch.delenv(name, raising=False)
    inside = [threading.Event(), threading.Event()]

    def made(_, store, rank, size, options):
        inside[rank].set()
        if rank == 0:
            second.start()
            inside[1].wait(0.3)  # forever, where one waits for the other
        else:
            assert left.wait(10)
        seen.append(os.environ.get(name))

    monkeypatch.setattr(FakeGroup, "__init__", made)
    second = threading.Thread(target=communicator._made, args=(None, 1, 2), daemon=True)
    communicator._made(None, 0, 2)
    left.set()
    second.join(10)
    assert (seen, os.environ.get(name)) == (["1", "1"], None)


def test_one_communicator_serves_all_broadcasts(group):
    for _ in range(3):
        group.broadcast(torch.zeros(4))
    assert [made.broadcasts for made in FakeGroup.made] == [4], "one forms it"


def test_a_communicator_that_does_not_form_in_time_is_given_up_and_ends_when_it_has_formed(communicator):
    """NCCL waits forever for a rank that is stopped just then. Nothing is broadcast with it later."""
    FakeGroup.let_go = threading.Event()
    group = communicator.Communicator(store(0.2), 0, 2)
    with pytest.raises(TransportError, match=r"send: no communicator with transport rank 1 within 0\.2 s"):
        group.broadcast(torch.zeros(4))
    (made,) = FakeGroup.made
    assert made.aborted.is_set()
    made.aborted.clear()  # as NCCL: what is being formed can't be aborted
    FakeGroup.let_go.set()
    assert made.aborted.wait(10)
    assert made.broadcasts == 1
    with pytest.raises(TransportError, match="send: closed"):
        group.broadcast(torch.zeros(4))
    assert len(FakeGroup.made) == 1


def test_a_rank_that_does_not_come_is_named(communicator):
    lonely = KeyValueStore("", 0.3)
    lonely.put("here/1", b"")
    with pytest.raises(TransportError, match=r"send: transport rank 2 did not answer within 0\.3 s"):
        communicator.Communicator(lonely, 0, 3).broadcast(torch.zeros(4))
    assert FakeGroup.made == []


def test_who_is_closed_before_the_ranks_are_there_makes_no_communicator(communicator):
    closing = store()
    group = communicator.Communicator(closing, 0, 2)
    closing.take = lambda *_: group.abort()
    with pytest.raises(TransportError, match="send: closed"):
        group.broadcast(torch.zeros(4))
    assert FakeGroup.made == []


def test_a_rank_tells_that_it_is_there_before_it_forms_a_communicator(communicator):
    with store_elsewhere() as (_, address):
        there = KeyValueStore(address, 5.0)
        communicator.Communicator(there, 1, 2).broadcast(torch.zeros(4))
        assert there.take("here/1", "rank 1", "test") == b""


def test_after_closing_no_communicator_is_made(group):
    """Another one would wait for ranks that are gone, and write where the engine may read by then."""
    group.broadcast(torch.zeros(4))
    group.abort()
    with pytest.raises(TransportError, match="send: closed"):
        group.broadcast(torch.zeros(4))
    assert len(FakeGroup.made) == 1
    assert FakeGroup.made[0].aborted.is_set()


def test_closing_while_a_broadcast_waits_for_a_rank_ends_it(group):
    FakeGroup.let_go, raised = threading.Event(), []

    def send():
        try:
            for _ in range(2):
                group.broadcast(torch.zeros(4))
        except TransportError as error:
            raised.append(str(error))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    eventually(lambda: FakeGroup.made and FakeGroup.made[0].broadcasts, "the first broadcast")
    closing = threading.Thread(target=group.abort, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive(), "closing waits for the broadcast"
    FakeGroup.let_go.set()
    sending.join(10)
    assert raised == ["send: NCCL communicator was aborted"]
    assert len(FakeGroup.made) == 1


def test_a_communicator_that_nccl_does_not_end_is_abandoned(communicator, group, monkeypatch, caplog):
    """Who closes it is the publisher's thread, which serves all generators."""
    let_go, ended, looked = threading.Event(), threading.Event(), threading.Event()
    within = communicator.within

    def held_up(self):
        assert let_go.wait(20)
        ended.set()

    def returning_late(*call):
        try:
            return within(*call)
        finally:
            assert threading.current_thread() is not closing or looked.wait(20)

    monkeypatch.setattr(communicator, "_END_S", 0.3)
    monkeypatch.setattr(communicator, "within", returning_late)
    monkeypatch.setattr(FakeGroup, "abort", held_up)
    closing = threading.Thread(target=group.abort, daemon=True)
    group.broadcast(torch.zeros(4))
    assert group.ended
    closing.start()
    eventually(lambda: group._closed and not group.ended, "the end's beginning")
    with pytest.raises(TransportError, match="send: closed"):
        group.broadcast(torch.zeros(4))
    group.abort()
    assert closing.is_alive(), "no other thread waits"
    looked.set()
    closing.join(10)
    assert not ended.is_set()
    assert not group.ended
    assert caplog.messages == ["transport rank 0: NCCL has not ended a communicator within 0.3 s"]
    let_go.set()
    assert ended.wait(10), "its end continues"
    eventually(lambda: group.ended, "the end")


def test_who_finds_a_communicator_closed_finds_that_it_has_not_ended(group):
    """A receiver that closes while its transfer gives up would free what NCCL may still write."""
    seen, lock = [], group._lock

    class Watched:
        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_):
            seen.append((group._closed, group.ended))
            lock.release()

    group.broadcast(torch.zeros(4))
    group._lock = Watched()
    group.abort()
    assert seen == [(True, False)]
    assert group.ended


def test_an_error_of_nccl_while_ending_is_logged_only(group, monkeypatch, caplog):
    """The publisher's thread would end with it, and all generators with that."""

    def fails(self):
        raise RuntimeError("unhandled system error\nmore")

    monkeypatch.setattr(FakeGroup, "abort", fails)
    group.broadcast(torch.zeros(4))
    with pytest.raises(TransportError, match=r"send: a broadcast did not end within 0\.2 s"):
        group._store.timeout_s = 0.2
        group.finish(Never(), "send")
    assert caplog.messages == ["transport rank 0: NCCL can't end a communicator: unhandled system error"]
    assert group.ended
    group.abort()
    assert len(caplog.messages) == 1, "once"


def test_where_no_thread_can_be_started_a_communicator_is_ended_all_the_same(group, monkeypatch):
    """As while the interpreter ends, from Python 3.12 on."""
    group.broadcast(torch.zeros(4))

    def none_left(*_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(timeout._thread, "start_new_thread", none_left)
        group.abort()
    assert FakeGroup.made[0].aborted.is_set()
    assert group.ended


def test_one_that_is_not_made_in_time_blocks_no_other(communicator, monkeypatch):
    let_go = threading.Event()

    class Slow(FakeGroup):
        def __init__(self, *args):
            super().__init__(*args)
            assert let_go.wait(20)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Slow)
    group = communicator.Communicator(store(0.2), 0, 2)
    with pytest.raises(TransportError, match=r"send: no communicator with transport rank 1 within 0\.2 s"):
        group.broadcast(torch.zeros(4))
    group.abort()
    (made,) = FakeGroup.made
    assert not made.aborted.is_set()
    let_go.set()
    assert made.aborted.wait(10)
    assert made.broadcasts == 0


BUCKETS = [BucketMeta(offset=0, nbytes=4), BucketMeta(offset=4, nbytes=4)]


def sends(nccl, buffer):
    sender = nccl.NcclSender(2, 5.0)
    for key, value in {"here/1": b"", "runs/1": msgspec.msgpack.encode([])}.items():
        sender._store.put(key, value)
    sender.send(buffer, BUCKETS)


def receives(nccl, buffer):
    with store_elsewhere() as (_, address):
        nccl.NcclReceiver(address, 1, 2, 5.0).receive(buffer, BUCKETS)


def receives_into(nccl, buffer):
    with store_elsewhere() as (_, address):
        scatter = ScatterTarget(buffer, buffer.device, (CopyRegion(0, 0, 8),))
        nccl.NcclReceiver(address, 1, 2, 5.0).receive_into(scatter, BUCKETS)


def test_nothing_is_broadcast_of_a_version_that_is_being_packed(nccl):
    """Over gloo neither. `send` does not look at how far the packing is."""
    assert not nccl.NcclSender.follows
    assert not GlooSender.follows


@pytest.mark.parametrize(
    ("transfer", "each"),
    [(sends, ["held", "event"]), (receives, ["held", "event"]), (receives_into, ["held", "copied", "event"])],
)
def test_streams_wait_for_each_broadcast_and_threads_do_not(nccl, monkeypatch, transfer, each):
    """What comes behind it would read or report bytes that are not there yet; a work's `wait` would block."""
    queued = []
    come = SimpleNamespace(query=lambda: True)
    stream = SimpleNamespace(record_event=lambda: queued.append("event") or come, cuda_stream=0)
    work = SimpleNamespace(block_current_stream=lambda: queued.append("held"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(Event, "record", lambda self, stream: queued.append("formed"))
    monkeypatch.setattr(FakeGroup, "broadcast", lambda self, tensors, how: work)
    monkeypatch.setattr(nccl.cuda, "copy", lambda *_: queued.append("copied"))
    transfer(nccl, torch.zeros(8, dtype=torch.uint8))
    assert queued == ["held", "formed", *each, *each]


@pytest.fixture
def receiver(nccl, monkeypatch):
    """One that has received, and whose streams are `busy` so many times more when they are asked."""
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: True), cuda_stream=0, busy=0)

    def query():
        assert FakeGroup.made[0].aborted.is_set(), "what is queued behind a broadcast ends with the communicator"
        stream.busy -= 1
        return stream.busy < 0

    stream.query = query
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(nccl.cuda, "copy", lambda *_: None)
    buffer = torch.zeros(8, dtype=torch.uint8)
    with store_elsewhere() as (_, address):
        made = nccl.NcclReceiver(address, 1, 2, 0.5)
        made.receive_into(ScatterTarget(buffer, buffer.device, (CopyRegion(0, 0, 8),)), BUCKETS)
        made.stream = stream
        yield made


def test_what_copies_to_the_shadow_has_ended_when_a_receiver_is_closed(receiver):
    """The next transport fills the same shadow."""
    receiver.stream.busy = 3
    receiver.close()
    assert receiver.stream.busy < 0
    assert receiver._staging == []


def test_what_nccl_may_still_write_keeps_its_memory_too(nccl, communicator, receiver, monkeypatch):
    """No stream is behind a broadcast of which that was not said yet."""
    monkeypatch.setattr(nccl, "_unfinished", [])
    monkeypatch.setattr(communicator, "_END_S", 0.1)
    let_go = threading.Event()
    abort = FakeGroup.abort
    monkeypatch.setattr(FakeGroup, "abort", lambda self: (abort(self), let_go.wait(20)))
    with pytest.raises(TransportError, match=r"close: NCCL has not ended a communicator after 0\.5 s"):
        receiver.close()
    assert nccl._unfinished == [receiver._staging]
    let_go.set()


def test_copies_that_do_not_end_keep_their_memory_and_the_receiver_from_another_version(nccl, receiver, monkeypatch):
    monkeypatch.setattr(nccl, "_unfinished", [])
    receiver.stream.busy = 10**9
    with pytest.raises(TransportError, match=r"close: the device still copies after 0\.5 s"):
        receiver.close()
    assert len(receiver._staging) == 2
    assert nccl._unfinished == [receiver._staging], "also when nothing refers to the receiver any more"


@pytest.mark.parametrize(
    ("harm", "timeout_s", "said"),
    [
        (kill, 120.0, "receive: the trainer is gone"),
        (stop, 1.0, "receive: the trainer did not answer within 0"),
    ],
)
def test_a_rank_that_waits_finds_out_that_the_sender_is_gone(communicator, harm, timeout_s, said):
    """Killed: at once, long before the bound. Stopped: within the bound."""
    with store_elsewhere() as (sender, address):
        group = communicator.Communicator(KeyValueStore(address, timeout_s), 1, 2)
        group.broadcast(torch.zeros(4))
        harm(sender)
        with pytest.raises(TransportError, match=said):
            group.finish(Never(), "receive")
    assert FakeGroup.made[0].aborted.is_set()
    with pytest.raises(TransportError, match="receive: closed"):
        group.broadcast(torch.zeros(4))


def test_a_sender_that_waits_sends_no_checks(communicator):
    """Its store is its own; it learns of a rank's death from the link."""
    group = communicator.Communicator(store(0.2), 0, 2)
    group.broadcast(torch.zeros(4))
    with pytest.raises(TransportError, match=r"send: a broadcast did not end within 0\.2 s"):
        group.finish(Never(), "send")


def test_who_waits_to_the_end_of_the_bound_does_not_blame_a_sender_that_lives(communicator):
    """The last question too gets the time of an answer."""
    limits = []
    living = store(0.3)
    living.confirm = lambda who, phase, limit_s: limits.append(limit_s)
    group = communicator.Communicator(living, 1, 2)
    group.broadcast(torch.zeros(4))
    with pytest.raises(TransportError, match=r"receive: a broadcast did not end within 0\.3 s"):
        group.finish(Never(), "receive")
    assert limits
    assert min(limits) >= communicator._LOOK_S


@pytest.mark.parametrize("rank, phase", [(0, "send"), (1, "receive")])
def test_an_aborted_broadcast_does_not_count_as_done(communicator, rank, phase):
    """Its event comes when the kernel has ended, of whatever."""
    group = communicator.Communicator(store(20.0), rank, 2)
    group.broadcast(torch.zeros(4))
    event = SimpleNamespace(query=FakeGroup.made[0].aborted.is_set)
    threading.Timer(0.02, group.abort).start()
    with pytest.raises(TransportError, match=f"{phase}: closed"):
        group.finish(event, phase)
