"""What a rank does around a pull over CUDA IPC, without CUDA: copies are calls here, the store is a real one."""

import contextlib
import ctypes
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transports import kill, stop, store_elsewhere, without_cuda

from inflight.doctor import probes
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.scatter import CopyRegion, ScatterTarget

BUFFER = torch.zeros(64, dtype=torch.uint8)


def offer(packed=1 << 40):
    """Of a buffer whose first `packed` bytes are packed."""
    return bytes(80) + packed.to_bytes(8, "little")


@pytest.fixture
def ipc(monkeypatch):
    with without_cuda(monkeypatch, "ipc") as ipc:
        monkeypatch.setattr(ipc.cuda, "bind", lambda device: None)
        monkeypatch.setattr(ipc.IpcReceiver, "_address", lambda self, offer: 0)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=0))
        landed = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: landed)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        yield ipc


@pytest.fixture
def trainer():
    """Its process and the address of its store, on which a buffer is offered."""
    with store_elsewhere("offer/0") as found:
        yield found


def pull(ipc, address, timeout_s):
    receiver = ipc.IpcReceiver(address, 1, 2, timeout_s)
    receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, (CopyRegion(0, 0, 64),)), [])


@pytest.mark.parametrize(
    ("harm", "timeout_s", "said"),
    [(kill, 30.0, "receive: the trainer is gone"), (stop, 0.5, "receive: the trainer did not answer within")],
)
def test_what_was_pulled_from_a_trainer_that_is_gone_is_not_received(ipc, trainer, monkeypatch, harm, timeout_s, said):
    """The copies raise nothing; what they gave is undefined."""
    process, address = trainer
    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", lambda *_: harm(process))
    with pytest.raises(TransportError, match=said):
        pull(ipc, address, timeout_s)


def test_a_live_trainer_confirms_the_transfer(ipc, trainer, monkeypatch):
    (_, address), copies = trainer, []
    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", lambda *order: copies.append(order))
    pull(ipc, address, 5.0)
    assert len(copies) == 1
    assert KeyValueStore(address, 5.0).take("done/0/1", "the rank", "send") == b""


MB = 1 << 20


@pytest.mark.parametrize("nbytes", [64 * MB, 2048 * MB])
def test_calls_hold_each_byte_once_and_in_order(ipc, nbytes):
    widths = [200 * MB, 512, 70 * MB, *[512] * 100, 3 * MB]
    starts = [sum(widths[:number]) for number in range(len(widths))]
    strips = [CopyRegion(start, start + 7, width) for start, width in zip(starts, widths, strict=True)]
    strips.append(CopyRegion(sum(widths), 0, 512, 1000, 1024, 4096))
    calls = ipc.in_calls(strips, nbytes)
    pieces = [piece for call in calls for piece in call]
    assert pieces[-1] == strips[-1]
    at = 0
    for piece in pieces[:-1]:
        assert (piece.source, piece.target, piece.rows) == (at, at + 7, 1)
        assert 0 < piece.width <= ipc.PIECE_BYTES
        at += piece.width
    assert at == sum(widths)
    assert max(len(call) for call in calls) == ipc.CALL_PIECES
    assert max(sum(piece.nbytes for piece in call) for call in calls if len(call) > 1) <= nbytes
    full = [call for call in calls[:-1] if len(call) < ipc.CALL_PIECES]
    following = [calls[calls.index(call) + 1][0].nbytes for call in full]
    assert all(sum(p.nbytes for p in call) + more > nbytes for call, more in zip(full, following, strict=True))


def test_the_strips_of_one_row_take_one_driver_call(ipc, monkeypatch):
    seen = []
    order = SimpleNamespace()
    driver = SimpleNamespace(
        CUmemcpyAttributes=lambda: order,
        CUmemcpySrcAccessOrder=SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM="stream"),
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUdeviceptr=lambda address: address,
        cuMemcpyBatchAsync=lambda *given: (seen.append(given), (0,))[1],
        cuMemcpy2DAsync=lambda order, stream: (seen.append((order.srcDevice, order.Height, stream)), (0,))[1],
        CUDA_MEMCPY2D=SimpleNamespace,
        CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4),
    )
    monkeypatch.setattr(ipc.cuda, "driver", driver)
    strips = [CopyRegion(0, 8, 4), CopyRegion(16, 64, 2, rows=3, source_pitch=8, target_pitch=4), CopyRegion(4, 0, 8)]
    ipc.cuda.copy_in_one_call(strips, 1000, 2000, 5)
    assert seen == [(1016, 3, 5), ([2008, 2000], [1000, 1004], [4, 8], 2, [order], [0], 1, 5)]
    assert order.srcAccessOrder == "stream"
    seen.clear()
    ipc.cuda.copy_in_one_call(strips[1:2], 1000, 2000, 5)
    assert seen == [(1016, 3, 5)], "no call without a strip"
    seen.clear()
    driver.cuMemcpyBatchAsync = Mock(side_effect=RuntimeError('Function "cuMemcpyBatchAsync" not found'))
    driver.cuMemcpyAsync = lambda *given: (seen.append(given), (0,))[1]
    ipc.cuda.copy_in_one_call(strips, 1000, 2000, 5)  # an older driver
    assert seen == [(1016, 3, 5), (2008, 1000, 4, 5), (2000, 1004, 8, 5)]
    driver.cuMemcpyBatchAsync = lambda *_: (SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),)
    with pytest.raises(ipc.cuda.CudaError, match="cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE"):
        ipc.cuda.copy_in_one_call(strips, 1000, 2000, 5)


def test_the_doctors_probe_copies_by_the_call_that_a_pull_makes(ipc, monkeypatch):
    """A driver that lacks it is found before a run."""
    theirs = torch.full((probes.PATTERN_BYTES,), probes.PATTERN, dtype=torch.uint8)
    calls, zeros = [], torch.zeros

    def moved(strips, source, target, stream):
        calls.append(stream)
        for strip in strips:
            ctypes.memmove(target + strip.target, source + strip.source, strip.width)

    own = SimpleNamespace(cuda_stream=7, wait_stream=calls.append, synchronize=lambda: calls.append("synchronized"))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **more: zeros(*shape, **more))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "default")
    monkeypatch.setattr(ipc, "opened", lambda offer: theirs.data_ptr())
    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", moved)
    assert probes.ipc_reader("00", "0") == {}
    assert calls == ["default", 7, "synchronized"], "the default stream can't be used in that call"
    theirs[-1] += 1
    with pytest.raises(RuntimeError, match="what was read is not what was written"):
        probes.ipc_reader("00", "0")


@pytest.fixture
def here():
    """The address of a trainer's store in this process, on which a buffer is offered."""
    store = KeyValueStore("", 5.0)
    store.put("offer/0", offer())
    yield store.address
    store.close()


@pytest.mark.parametrize("verify", [True, False])
def test_a_pull_of_several_calls_sums_each_after_its_copies_and_waits_for_all(ipc, here, monkeypatch, verify):
    """200 MB and an odd rest; without verification the driver is called once."""
    events = []
    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", lambda pieces, *_: events.append(("copy", tuple(pieces))))
    monkeypatch.setattr(ipc.cuda, "wait", lambda stream: events.append("wait"))
    receiver = ipc.IpcReceiver(here, 1, 2, 5.0, verify=verify)
    groups = []
    begin = lambda calls, device: groups.extend(map(tuple, calls))  # noqa: E731
    check = lambda number: events.append("check")  # noqa: E731
    add = lambda index, target: events.append(("sum", groups[index]))  # noqa: E731
    monkeypatch.setattr(receiver, "_sums", SimpleNamespace(begin=begin, add=add, check=check))
    strips = (CopyRegion(0, 0, 200 * MB), CopyRegion(300 * MB, 200 * MB, 512))
    receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, strips), [])
    assert len(groups) == (4 if verify else 1)
    assert sum(piece.nbytes for group in groups for piece in group) == 200 * MB + 512
    assert events == [*[(what, group) for group in groups for what in ("copy", "sum")], "wait", "check"]


def test_a_pull_of_no_strips_copies_nothing_and_is_confirmed(ipc, here):
    receiver = ipc.IpcReceiver(here, 1, 2, 5.0, verify=True)
    receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, ()), [])  # the driver here has no call to copy by
    assert KeyValueStore(here, 5.0).take("done/0/1", "the rank", "send") == b""


def test_a_rank_that_keeps_other_strips_than_before_is_refused(ipc, here, monkeypatch):
    copies = []
    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", lambda *order: copies.append(order))
    receiver = ipc.IpcReceiver(here, 1, 2, 5.0)
    receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, (CopyRegion(0, 0, 64),)), [])
    with pytest.raises(TransportError, match="this rank keeps other bytes than it has announced"):
        receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, (CopyRegion(0, 32, 32),)), [])
    assert len(copies) == 1


@pytest.mark.parametrize("in_a_call", [1, 2])
def test_a_rank_copies_what_is_packed_and_no_more(ipc, monkeypatch, in_a_call):
    """By calls in the order of the send buffer's bytes, whatever order the strips are in."""
    store = KeyValueStore("", 5.0)
    store.put("offer/0", offer(70 * MB))
    monkeypatch.setattr(ipc, "CALL_PIECES", in_a_call)
    copied, told = [], {100 * MB: "packed/0/1", 130 * MB: "packed/0/2"}
    at_most = [70 * MB]

    def copy(pieces, *_):
        copied.extend((piece.source, piece.target) for piece in pieces)
        assert all(piece.source_end <= at_most[0] for piece in pieces)

    take = KeyValueStore.take

    def taking(self, key, *args, **options):
        if key in told.values():  # it asks only when it has nothing left to copy
            (at_most[0],) = (end for end, name in told.items() if name == key)
            store.put(key, at_most[0].to_bytes(8, "little"))
        return take(self, key, *args, **options)

    monkeypatch.setattr(KeyValueStore, "take", taking)
    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", copy)
    receiver = ipc.IpcReceiver(store.address, 1, 2, 5.0)
    strips = (CopyRegion(110 * MB, 7, 20 * MB), CopyRegion(0, 20 * MB, 60 * MB), CopyRegion(60 * MB, 80 * MB, 40 * MB))
    receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, strips), [])
    assert copied == [(0, 20 * MB), (60 * MB, 80 * MB), (110 * MB, 7)]
    assert at_most == [130 * MB]
    store.close()


@pytest.mark.parametrize(
    ("harm", "timeout_s", "said"),
    [(kill, 30.0, "receive: the trainer is gone"), (stop, 0.5, "receive: the trainer did not answer within")],
)
def test_a_rank_that_waits_for_a_trainer_that_packs_no_more_gives_up_when_its_copies_are_over(
    ipc, monkeypatch, harm, timeout_s, said
):
    events = []
    monkeypatch.setattr(ipc.cuda, "wait", lambda stream: events.append("waited"))
    monkeypatch.setattr(ipc, "CALL_PIECES", 1)
    with store_elsewhere("offer/0") as (process, address):
        KeyValueStore(address, 5.0).put("offer/0", offer(8))

        def copy(pieces, *_):
            events.append(pieces[0].source)
            harm(process)

        monkeypatch.setattr(ipc.cuda, "copy_in_one_call", copy)
        receiver = ipc.IpcReceiver(address, 1, 2, timeout_s)
        strips = (CopyRegion(0, 0, 8), CopyRegion(8, 8, 8))
        with pytest.raises(TransportError, match=said):
            receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, strips), [])
    assert events == [0, "waited"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE"), "receive: pulling from the trainer's buffer"),
        (MemoryError("no memory"), "no memory"),
    ],
)
def test_a_pull_that_fails_half_way_ends_when_its_earlier_copies_are_over(ipc, here, monkeypatch, error, said):
    """Else they would write into the shadow while the next attempt fills it."""
    events = []
    monkeypatch.setattr(ipc, "CALL_PIECES", 1)
    monkeypatch.setattr(ipc.cuda, "wait", lambda stream: events.append("waited"))
    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", Mock(side_effect=[None, error]))
    put = KeyValueStore.put
    monkeypatch.setattr(KeyValueStore, "put", lambda store, key, value: (events.append(key), put(store, key, value)))
    receiver = ipc.IpcReceiver(here, 1, 2, 5.0)
    with pytest.raises((TransportError, MemoryError), match=said):
        receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, (CopyRegion(0, 0, 8), CopyRegion(8, 8, 8))), [])
    told = ["done/0/1"] if isinstance(error, RuntimeError) else []
    assert events == ["runs/1", "waited", *told], "the sender may end the transfer then"


def test_a_receiver_that_is_closed_while_the_trainer_packs_unmaps_when_its_copies_are_over(ipc, monkeypatch):
    store = KeyValueStore("", 30.0)
    store.put("offer/0", offer(8))
    events = []
    monkeypatch.setattr(ipc, "CALL_PIECES", 1)
    monkeypatch.setattr(ipc.cuda, "wait", lambda stream: events.append("waited"))
    monkeypatch.setattr(ipc.driver, "cuIpcCloseMemHandle", events.append, raising=False)
    receiver = ipc.IpcReceiver(store.address, 1, 2, 30.0)
    receiver._open[b"handle"] = 7

    def copy(pieces, *_):
        events.append("copied")
        receiver.close()

    monkeypatch.setattr(ipc.cuda, "copy_in_one_call", copy)
    with pytest.raises(TransportError, match="receive: closed while waiting for the trainer"):
        receiver.receive_into(ScatterTarget(BUFFER, BUFFER.device, (CopyRegion(0, 0, 8), CopyRegion(8, 8, 8))), [])
    assert events == ["copied", "waited", 7]
    store.close()


def test_a_sender_offers_the_buffer_when_its_first_part_is_packed_and_tells_of_the_others(ipc, monkeypatch):
    monkeypatch.setattr(ipc, "export", lambda buffer: bytes(80))
    sender = ipc.IpcSender(2, 5.0)
    assert sender.follows
    rank = KeyValueStore(sender.rendezvous, 5.0)
    rank.put("runs/1", b"\x90")
    keys = ["offer/0", "packed/0/1", "packed/0/2"]
    seen = []

    def packing():
        for end in (10, 30, 64):
            seen.append([key for key in keys if rank.tcp.check([key])])
            yield end
        rank.put("done/0/1", b"")

    sender.send(BUFFER, [], packing())
    assert seen == [[], keys[:1], keys[:2]]
    assert not any(rank.tcp.check([key]) for key in keys), "nothing is left of the transfer"
    rank.put("done/1/1", b"")
    monkeypatch.setattr(sender._store, "drop", lambda key: None)
    sender.send(BUFFER, [])
    assert rank.take("offer/1", "the trainer", "receive") == offer(64), "a buffer that is complete"
    sender.close()
