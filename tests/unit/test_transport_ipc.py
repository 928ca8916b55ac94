"""What a rank does around a pull over CUDA IPC, without CUDA: copies are calls here, the store is a real one."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from transports import kill, stop, store_elsewhere, without_cuda

from inflight.weights.transport.base import TransportError
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.scatter import CopyRegion, ScatterTarget

BUFFER = torch.zeros(64, dtype=torch.uint8)


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
    monkeypatch.setattr(ipc.cuda, "copy", lambda *_: harm(process))
    with pytest.raises(TransportError, match=said):
        pull(ipc, address, timeout_s)


def test_a_live_trainer_confirms_the_transfer(ipc, trainer, monkeypatch):
    (_, address), copies = trainer, []
    monkeypatch.setattr(ipc.cuda, "copy", lambda *order: copies.append(order))
    pull(ipc, address, 5.0)
    assert len(copies) == 1
    assert KeyValueStore(address, 5.0).take("done/0/1", "the rank", "send") == b""
