"""What a rank does around a pull over CUDA IPC, without CUDA: copies are calls here, the board is a real one."""

import contextlib
import signal
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from inflight.weights.transport.base import TransportError
from inflight.weights.transport.landing import Landing, Strip
from inflight.weights.transport.rendezvous import Board

HOST = """
import time
from inflight.weights.transport.rendezvous import Board
board = Board("", 5.0)
board.put("offer/0", bytes(80))
print(board.address, flush=True)
time.sleep(60)
"""
BUFFER = torch.zeros(64, dtype=torch.uint8)


@pytest.fixture
def ipc(monkeypatch):
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["cuda.bindings"].driver = SimpleNamespace(CUDA_MEMCPY2D=object)
    for name in ("cuda", "ipc"):
        monkeypatch.delitem(sys.modules, f"inflight.weights.transport.{name}", raising=False)
    from inflight.weights.transport import ipc

    monkeypatch.setattr(ipc.cuda, "bind", lambda device: None)
    monkeypatch.setattr(ipc.IpcReceiver, "_address", lambda self, offer: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=0, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    yield ipc
    for name in ("cuda", "ipc"):
        sys.modules.pop(f"inflight.weights.transport.{name}", None)


@pytest.fixture
def trainer():
    process = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate(timeout=20)


def pull(ipc, address, timeout_s):
    receiver = ipc.IpcReceiver(address, 1, 2, timeout_s)
    receiver.receive_into(Landing(BUFFER, BUFFER.device, (Strip(0, 0, 64),)), [])


@pytest.mark.parametrize(
    ("harm", "timeout_s", "said"),
    [("SIGKILL", 30.0, "receive: the trainer is gone"), ("SIGSTOP", 0.5, "receive: the trainer did not answer within")],
)
def test_what_was_pulled_from_a_trainer_that_is_gone_is_not_received(ipc, trainer, monkeypatch, harm, timeout_s, said):
    """The copies raise nothing; what they gave is undefined."""
    address = trainer.stdout.readline().strip()

    def copy(*_):
        trainer.send_signal(getattr(signal, harm))
        if harm == "SIGKILL":
            trainer.wait(20)

    monkeypatch.setattr(ipc.cuda, "copy", copy)
    with pytest.raises(TransportError, match=said):
        pull(ipc, address, timeout_s)


def test_a_trainer_that_lives_is_told(ipc, trainer, monkeypatch):
    address, copies = trainer.stdout.readline().strip(), []
    monkeypatch.setattr(ipc.cuda, "copy", lambda *order: copies.append(order))
    pull(ipc, address, 5.0)
    assert len(copies) == 1
    assert Board(address, 5.0).take("done/0/1", "the rank", "send") == b""
