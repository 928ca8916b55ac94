"""Real gloo groups on loopback: bytes, bounds, and that no end hangs when another one goes away."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_generator import eventually
from transports import stop

from inflight.config.network import NetworkConfig, parted
from inflight.messages import BucketMeta
from inflight.weights.transport import make_buffer, make_sender, resolve
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.gloo import GlooReceiver, GlooSender

BUCKETS = [BucketMeta(offset=0, nbytes=1000), BucketMeta(offset=1000, nbytes=1000), BucketMeta(offset=2000, nbytes=48)]
BYTES = torch.arange(2048, dtype=torch.int32).to(torch.uint8)


class Side(threading.Thread):
    """Runs one side's transfer and keeps what it raised."""

    def __init__(self, transfer, buffer, buckets=BUCKETS):
        super().__init__(daemon=True)
        self.transfer, self.buffer, self.buckets, self.error = transfer, buffer, buckets, None
        self.start()

    def run(self):
        try:
            self.transfer(self.buffer, self.buckets)
        except TransportError as error:
            self.error = error

    def done(self, timeout_s=20):
        self.join(timeout_s)
        assert not self.is_alive(), "the transfer hangs"
        return self.error


def test_every_rank_gets_every_byte_again_and_again():
    sender = GlooSender(3, 10)
    receivers = [GlooReceiver(sender.rendezvous, rank, 3, 10) for rank in (1, 2)]
    for round_ in range(3):
        sent = (BYTES + round_).to(torch.uint8)
        buffers = [torch.zeros_like(sent) for _ in receivers]
        sides = [Side(r.receive, b) for r, b in zip(receivers, buffers, strict=True)]
        sender.send(sent, BUCKETS)
        assert [side.done() for side in sides] == [None, None]
        assert all(torch.equal(buffer, sent) for buffer in buffers)
    assert not dist.is_initialized()
    for end in (sender, *receivers):
        end.close()


def test_groups_do_not_mix_with_each_other_or_the_default_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/d", rank=0, world_size=1)
    try:
        senders = [GlooSender(2, 10) for _ in range(2)]
        buffers = [torch.zeros_like(BYTES) for _ in senders]
        sides = [Side(GlooReceiver(s.rendezvous, 1, 2, 10).receive, b) for s, b in zip(senders, buffers, strict=True)]
        for index, sender in enumerate(senders):
            sender.send((BYTES + index).to(torch.uint8), BUCKETS)
        assert [side.done() for side in sides] == [None, None]
        assert not torch.equal(*buffers)
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_the_store_listens_on_loopback_only():
    sender = GlooSender(2, 5)
    port = int(sender.rendezvous.partition("/")[0].rpartition(":")[2])
    tables = "".join(Path(f"/proc/self/net/{table}").read_text() for table in ("tcp", "tcp6"))
    listening = [line.split()[1] for line in tables.splitlines() if f":{port:04X} " in line and " 0A " in line]
    assert listening == [f"0100007F:{port:04X}"]


def is_open(rendezvous):
    try:
        socket.create_connection(parted(rendezvous.partition("/")[0]), 20).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_store_listens_only_while_a_group_is_to_be_formed():
    """And is not missed afterwards: two ranks besides the trainer look each other up in it."""
    own = NetworkConfig(bind="127.0.0.3")  # tests that leave groups unformed have another store

    def form(sender, size):
        receivers = [GlooReceiver(sender.rendezvous, rank, size, 20, own) for rank in range(1, size)]
        sides = [Side(receiver.receive, torch.zeros_like(BYTES)) for receiver in receivers]
        sender.send(BYTES, BUCKETS)
        assert [side.done() for side in sides] == [None] * (size - 1)
        return receivers

    large, small = GlooSender(3, 20, own), GlooSender(2, 20, own)
    ends = [large, small, *form(large, 3)]
    assert is_open(small.rendezvous), "a group is still to be formed"
    ends += form(small, 2)
    assert not is_open(small.rendezvous)
    buffer = torch.zeros_like(BYTES)
    again = Side(ends[-1].receive, buffer)
    small.send(BYTES, BUCKETS)
    assert again.done() is None
    assert torch.equal(buffer, BYTES)
    given_up = GlooSender(2, 20, own)
    given_up.close()
    assert is_open(given_up.rendezvous), "its rank may be late"
    late = GlooSender(2, 20, own)
    ends += [late, *form(late, 2)]
    assert not is_open(late.rendezvous)
    for end in ends:
        end.close()


def test_a_receiver_that_never_comes_is_named():
    sender = GlooSender(3, 0.5)
    present = Side(GlooReceiver(sender.rendezvous, 1, 3, 20).receive, torch.zeros_like(BYTES))
    store = sender._group._store()
    eventually(lambda: store.check(["here/1"]), "the first receiver's coming")
    with pytest.raises(TransportError, match=r"send, connecting: transport ranks 2 did not come within 0\.5 s"):
        sender.send(BYTES, BUCKETS)
    assert "receive, connecting" in str(present.done())


def test_a_receiver_that_stops_taking_ends_the_transfer_within_the_timeout():
    sender = GlooSender(2, 1)
    receiver = GlooReceiver(sender.rendezvous, 1, 2, 1)
    large = torch.zeros(32 << 20, dtype=torch.uint8)
    whole = [BucketMeta(offset=0, nbytes=1 << 20), BucketMeta(offset=1 << 20, nbytes=31 << 20)]
    side = Side(receiver.receive, large.clone(), whole[:1])
    with pytest.raises(TransportError, match=r"send, bucket 1 of 2: .*[Tt]imed out"):
        sender.send(large, whole)
    assert side.done() is None
    with pytest.raises(TransportError, match="closed"):
        sender.send(large, whole)


def test_a_receiver_that_closes_is_noticed_at_once_by_all():
    sender = GlooSender(3, 30)
    leaving, staying = (GlooReceiver(sender.rendezvous, rank, 3, 30) for rank in (1, 2))
    first = [Side(r.receive, torch.zeros_like(BYTES)) for r in (leaving, staying)]
    sender.send(BYTES, BUCKETS)
    assert [side.done() for side in first] == [None, None]
    large = torch.zeros(32 << 20, dtype=torch.uint8)
    whole = [BucketMeta(offset=0, nbytes=32 << 20)]
    left = Side(staying.receive, large.clone(), whole)
    leaving.close()
    assert "send, bucket 0 of 1" in str(Side(sender.send, large, whole).done())
    assert "receive, bucket 0 of 1" in str(left.done())


def test_a_sender_that_closes_while_it_waits_for_receivers_stops_waiting():
    sender = GlooSender(2, 30)
    side = Side(sender.send, BYTES)
    time.sleep(0.05)
    sender.close()
    assert "connecting: closed" in str(side.done())


def test_a_sender_that_closes_frees_its_receivers():
    sender = GlooSender(2, 30)
    receiver = GlooReceiver(sender.rendezvous, 1, 2, 30)
    side = Side(receiver.receive, torch.zeros_like(BYTES))
    sender.send(BYTES, BUCKETS)
    assert side.done() is None
    waiting = Side(receiver.receive, torch.zeros_like(BYTES))
    sender.close()
    assert "receive, bucket 0" in str(waiting.done())


def test_a_receiver_whose_sender_is_gone_does_not_wait_for_it():
    sender = GlooSender(2, 30)
    receiver = GlooReceiver(sender.rendezvous, 1, 2, 30)
    sender.close()
    assert "the trainer has closed it" in str(Side(receiver.receive, torch.zeros_like(BYTES)).done())
    nobody = GlooReceiver("127.0.0.1:9/x", 1, 2, 30)
    assert "receive, connecting: [Errno 111]" in str(Side(nobody.receive, torch.zeros_like(BYTES)).done())


def receive_one_and_die(rendezvous):
    GlooReceiver(rendezvous, 1, 2, 30).receive(torch.zeros(2048, dtype=torch.uint8), BUCKETS[:1])
    os.kill(os.getpid(), 9)


def test_a_receiver_whose_sender_is_stopped_waits_no_longer_than_the_bound():
    """Its store is there and does not answer; torch's client would wait until it continues."""
    code = "import time; from inflight.weights.transport.gloo import GlooSender as S; s = S(2, 9)\n"
    code += "print(s.rendezvous, flush=True); time.sleep(60)"
    sender = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        receiver = GlooReceiver(sender.stdout.readline().strip(), 1, 2, 0.2)
        stop(sender)
        error = Side(receiver.receive, torch.zeros_like(BYTES)).done()
        assert str(error) == "receive, connecting: no answer within 5.2 s"
        receiver.close()
    finally:
        sender.kill()
        sender.communicate(timeout=20)


def test_a_killed_receiver_ends_the_transfer():
    sender = GlooSender(2, 30)
    process = multiprocessing.get_context("fork").Process(target=receive_one_and_die, args=(sender.rendezvous,))
    process.start()
    large = torch.zeros(32 << 20, dtype=torch.uint8)
    side = Side(sender.send, large, [BUCKETS[0], BucketMeta(offset=1000, nbytes=31 << 20)])
    process.join(20)
    assert process.exitcode == -9
    assert "send, bucket 1 of 2" in str(side.done())


@pytest.mark.parametrize("rendezvous", ["127.0.0.1:1", "host.example:80/x", "127.0.0.1:http/x", "127.0.0.1:1/../x", ""])
def test_what_is_no_rendezvous_is_refused(rendezvous):
    with pytest.raises(TransportError, match=r"connect: rendezvous: .* (is no IP address with a port|has no prefix)"):
        GlooReceiver(rendezvous, 1, 2, 1)


def test_the_transport_follows_the_parameters_unless_configured():
    assert resolve("auto", torch.device("cpu")) == "gloo"
    cuda = torch.device("cuda")
    assert resolve("auto", cuda, lambda device: "") == resolve("ipc", cuda, lambda device: "") == "ipc"
    assert resolve("nccl", cuda) == "nccl"
    assert make_buffer("gloo", 8, torch.device("meta")).device.type == "cpu"
    with pytest.raises(TransportError, match="no transport is named 'pigeon'"):
        make_sender("pigeon", 2, 1)


def test_memory_that_can_not_be_exported_is_sent_over_nccl_or_refused(caplog):
    """As that of torch's expandable segments."""
    cuda = torch.device("cuda")
    assert resolve("auto", cuda, lambda device: "it can't be shared") == "nccl"
    assert "weights are sent over NCCL, not CUDA IPC: it can't be shared" in caplog.text
    with pytest.raises(TransportError, match=r"publish\.transport=ipc: it can't be shared; nccl or auto"):
        resolve("ipc", cuda, lambda device: "it can't be shared")


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("the store does not answer")])
def test_closing_raises_nothing_when_the_store_does_not_answer(error):
    sender = GlooSender(2, 5)

    def broken():
        raise error

    sender._group._store = broken
    sender.close()
