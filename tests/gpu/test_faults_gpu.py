"""Transactions on GPUs: what is verified, and what a death in the middle of a version's bytes does to those who live.

The figures are printed (`-s`), one JSON object a line. `INFLIGHT_SHAPE` is the model's (bench/gpu_shapes.py),
`INFLIGHT_EAGER=1` leaves graphs out, `INFLIGHT_APART=1` puts each process on a host of its own as far as NCCL can tell:
it then takes sockets, neither peer access nor shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_shapes import random_model
from inflight.config import BusConfig, GeneratorConfig, ModelConfig, PublishConfig, RunConfig, TaskConfig
from inflight.messages import BucketMeta
from inflight.models import prepare

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))

from serving import Serving
from transactions import generator_killed, trainer_killed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = os.environ.get("INFLIGHT_SHAPE", "1.5b")


def gpu(number: int) -> str:
    """The name of a GPU that this process may use, for CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[number]


def last_gpu() -> str:
    """That of a rank in this process: the sender's own, GPU 0, only where there is no other."""
    return f"cuda:{torch.cuda.device_count() - 1}"


# --- what is verified ------------------------------------------------------------

NBYTES = 300 << 20
FRESH = 9
"""What the bytes of a buffer become that is packed while it is sent."""
BUCKETS = [BucketMeta(offset=at, nbytes=min(32 << 20, NBYTES - at)) for at in range(0, NBYTES, 32 << 20)]


class Sending:
    """The trainer's process: sends on order, and corrupts its buffer on order."""

    def __init__(self, transport: str, size: int = 2, timeout_s: float = 20.0) -> None:
        code = f"from tests.gpu.test_faults_gpu import send; send({transport!r}, {size}, {timeout_s})"
        # NCCL takes two processes on one GPU on different hosts only.
        alone = {"NCCL_HOSTID": "sender"} if torch.cuda.device_count() == 1 else {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu(0), **alone},
        )
        self.rendezvous = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the sender ended"
        return line.strip()

    def order(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()


def send(transport: str, size: int, timeout_s: float) -> None:
    """Orders: `sound`, `flip BYTE` (between the sums and the sending), `part N` (N buckets and no more), `follow`
    (while the buffer is packed slowly: FRESH everywhere), then `overwrite` at any time; `again` closes the sender and
    makes one for two ranks."""
    from inflight.weights.transport import TransportError, make_sender
    from inflight.weights.transport.sums import SenderSums

    torch.cuda.set_device(0)
    buffer = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    sender = make_sender(transport, size, timeout_s)
    post = SenderSums.post
    print(sender.rendezvous, flush=True)
    for line in sys.stdin:
        order, _, at = line.strip().partition(" ")

        def posting(self: Any, number: int, buffer: torch.Tensor, order: str = order, at: str = at) -> None:
            post(self, number, buffer)
            if order == "flip":
                buffer[int(at)] ^= 1
                torch.cuda.synchronize()

        SenderSums.post = posting  # type: ignore[method-assign]
        if order == "overwrite":
            buffer.random_(0, 256)
            torch.cuda.synchronize()
            print("overwritten", flush=True)
            continue
        if order == "watched":  # stays able to hear an order while the other side pulls
            threading.Thread(target=sender.send, args=(buffer, BUCKETS), daemon=True).start()
            continue
        if order == "again":
            sender.close()
            sender = make_sender(transport, 2, timeout_s)
            print(sender.rendezvous, flush=True)
            continue
        packed = packing(buffer) if order == "follow" else ()
        try:
            sender.send(buffer, BUCKETS[: int(at)] if order == "part" else BUCKETS, packed)
        except TransportError as error:
            print(error, flush=True)
        else:
            print("sent", flush=True)


def packing(buffer: torch.Tensor) -> Any:
    """Queues that each 32 MiB of the buffer get their bytes, after 20 ms or more each; returns how far that is."""
    from inflight.weights.publish.progress import PackingProgress

    progress, stream = PackingProgress(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for bucket in BUCKETS:
            torch.cuda._sleep(40_000_000)
            buffer[bucket.offset : bucket.offset + bucket.nbytes] = FRESH
            progress.mark(bucket.offset + bucket.nbytes, stream)
    return progress


@pytest.fixture
def sending(request: pytest.FixtureRequest) -> Iterator[tuple[str, Sending]]:
    made = Sending(request.param)
    yield request.param, made
    made.process.kill()
    made.process.wait(20)


def receiver_of(transport: str, rendezvous: str, *, size: int = 2, verify: bool = True, timeout_s: float = 20.0) -> Any:
    from inflight.weights.transport.ipc import IpcReceiver
    from inflight.weights.transport.nccl import NcclReceiver

    return {"ipc": IpcReceiver, "nccl": NcclReceiver}[transport](rendezvous, 1, size, timeout_s, verify=verify)


def scatter_of(target: torch.Tensor) -> Any:
    """As of a rank of two: a parameter cut by rows, one cut by columns, and a small one."""
    from inflight.weights.transport.scatter import CopyRegion, ScatterTarget

    strips = (
        CopyRegion(0, 0, 100 << 20),
        CopyRegion(100 << 20, 100 << 20, 4096, 25 << 9, 8192, 4096),
        CopyRegion(250 << 20, (150 << 20) + 256, 7168),
        CopyRegion((250 << 20) + 7168, (160 << 20) + 2, 2 * 3583),
    )
    return ScatterTarget(target, target.device, strips)


@pytest.mark.parametrize("sending", ["ipc", "nccl"], indirect=True)
def test_harm_to_any_byte_that_a_rank_keeps_is_found_on_the_device(sending: tuple[str, Sending]) -> None:
    from inflight.weights.pack import ChecksumError

    transport, sender = sending
    target = torch.zeros(200 << 20, dtype=torch.uint8, device=last_gpu())
    receiver, scatter = receiver_of(transport, sender.rendezvous), scatter_of(target)
    kept = [0, (100 << 20) - 1, (100 << 20) + 4095, (250 << 20) + 7167, (250 << 20) + 7168 + 2 * 3583 - 1]
    not_kept = [(100 << 20) + 4096, 299 << 20]
    for at in [None, *kept, None, *not_kept]:
        sender.order("sound" if at is None else f"flip {at}")
        if at in kept:
            with pytest.raises(ChecksumError, match="differ from those sent in 1 of"):
                receiver.receive_into(scatter, BUCKETS)
        else:
            receiver.receive_into(scatter, BUCKETS)
        assert sender.answer() == "sent"
    receiver.close()


@pytest.mark.parametrize("sending", ["nccl"], indirect=True)
def test_a_rank_whose_sender_dies_between_two_buckets_gives_up_in_time(sending: tuple[str, Sending]) -> None:
    from inflight.weights.transport.base import TransportError

    transport, sender = sending
    target = torch.zeros(200 << 20, dtype=torch.uint8, device=last_gpu())
    receiver = receiver_of(transport, sender.rendezvous, timeout_s=4)
    sender.order("part 3")
    threads: list[str] = []

    def kill() -> None:
        sender.answer()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                threads.append(task.joinpath("comm").read_text())
        sender.process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    started = time.monotonic()
    with pytest.raises(TransportError, match="receive: "):
        receiver.receive_into(scatter_of(target), BUCKETS)
    assert time.monotonic() - started < 60, "communicator and all; the sender waits 20 s"
    killer.join(20)
    assert threads, "while the communicator was there"
    assert not [name for name in threads if name.startswith("pt_nccl")], "torch's would end an engine's process"
    receiver.close()


def test_a_rank_that_stops_while_a_communicator_forms_holds_up_neither_the_trainer_nor_another_rank() -> None:
    """Within NCCL, where all but it are by then, the wait has no bound. Both processes form another one beside that."""
    from inflight.weights.transport.base import TransportError
    from inflight.weights.transport.rendezvous import KeyValueStore
    from inflight.weights.transport.sums import RankSums

    sender, limit_s = Sending("nccl", size=3, timeout_s=5), 5.0
    try:
        scatter = scatter_of(torch.zeros(200 << 20, dtype=torch.uint8, device=last_gpu()))
        receiver = receiver_of("nccl", sender.rendezvous, size=3, timeout_s=limit_s)
        stopped = KeyValueStore(sender.rendezvous, limit_s)
        RankSums(stopped, 2, verify=False).begin([[]], torch.device("cpu"))
        stopped.reply("here/2", b"", "the trainer", "receive")
        sender.order("sound")
        started = time.monotonic()
        with pytest.raises(TransportError, match="receive: no communicator with the trainer within 5 s"):
            receiver.receive_into(scatter, BUCKETS)
        assert sender.answer() == "send: no communicator with transport rank 1, transport rank 2 within 5 s"
        assert time.monotonic() - started < 3 * limit_s
        receiver.close()
        sender.order("again")
        receiver = receiver_of("nccl", sender.answer(), timeout_s=limit_s)
        sender.order("sound")
        receiver.receive_into(scatter, BUCKETS)
        assert sender.answer() == "sent"
        receiver.close()
        assert sender.process.stdin is not None
        sender.process.stdin.close()
        assert sender.process.wait(20) == 0, "an abandoned transfer does not delay its end"
    finally:
        sender.process.kill()
        sender.process.wait(20)


@pytest.mark.parametrize("sending", ["ipc"], indirect=True)
def test_a_buffer_that_is_overwritten_while_a_rank_pulls_is_found(
    sending: tuple[str, Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    from inflight.weights.pack import ChecksumError
    from inflight.weights.transport import cuda

    transport, sender = sending
    target = torch.zeros(200 << 20, dtype=torch.uint8, device=last_gpu())
    receiver, scatter, copy, pieces = receiver_of(transport, sender.rendezvous), scatter_of(target), cuda.copy, [0]

    def overwriting(*args: Any) -> None:
        pieces[0] += 1
        if pieces[0] == 2:
            torch.cuda.synchronize()
            sender.order("overwrite")
            assert sender.answer() == "overwritten"
        copy(*args)

    monkeypatch.setattr(cuda, "copy", overwriting)
    sender.order("watched")
    with pytest.raises(ChecksumError, match="bytes differ from those sent"):
        receiver.receive_into(scatter, BUCKETS)
    receiver.close()


@pytest.mark.parametrize("sending", ["ipc"], indirect=True)
def test_a_rank_gets_no_byte_from_before_the_packing_that_it_follows(
    sending: tuple[str, Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    from inflight.weights.transport import ipc

    monkeypatch.setattr(ipc, "CALL_PIECES", 1)  # one call of all strips would wait for the last one's bytes
    transport, sender = sending
    target = torch.zeros(200 << 20, dtype=torch.uint8, device=last_gpu())
    receiver, scatter = receiver_of(transport, sender.rendezvous, verify=False), scatter_of(target)
    sender.order("sound")
    receiver.receive_into(scatter, BUCKETS)
    assert sender.answer() == "sent"
    before = int((target == FRESH).sum())
    sender.order("follow")
    receiver.receive_into(scatter, BUCKETS)
    assert sender.answer() == "sent"
    assert before < int((target == FRESH).sum()) == sum(strip.nbytes for strip in scatter.strips)
    receiver.close()


def test_sums_are_those_of_a_cpu_and_what_they_cost() -> None:
    """15 GB as one parameter of each kind after another, on the device; printed, not judged."""
    from inflight.weights.transport.sums import Run, Summing

    some = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8)
    runs = [Run(0, 64 << 20, 1, 0, 4), Run(4, 129_536, 500, 129_540, 4), Run(2, 7166, 290, 8192, 2)]
    runs += [Run(1, 129, 1000, 130, 1), Run(0, 3584, 9000, 7168, 4)]
    sums = []
    for memory, device in ((some, "cpu"), (some.to("cuda"), "cuda"), (some.pin_memory(), "cuda")):
        summing = Summing([runs[:2], runs[2:]], torch.device(device))
        for group in range(2):
            summing.add(group, memory)
        sums.append(summing.take())
    assert sums[0] == sums[1] == sums[2]
    free, _ = torch.cuda.mem_get_info()
    nbytes = min(15_200_000_000, free - (4 << 30)) // 8192 * 8192
    buffer = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    pieces = [(at, min(64 << 20, nbytes - at)) for at in range(0, nbytes, 64 << 20)]
    layouts = {
        "whole": [Run(at, size, 1, 0, 4) for at, size in pieces],
        "half of each row": [Run(at, 4096, size // 8192, 8192, 4) for at, size in pieces],
        "short rows": [Run(at, 448, size // 896, 896, 4) for at, size in pieces],
        "words of two bytes": [Run(at, size, 1, 0, 2) for at, size in pieces],
    }
    for name, runs in layouts.items():
        summing, seconds = Summing([runs], torch.device("cuda")), []
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            summing.add(0, buffer)
            summing.take()
            seconds.append(time.perf_counter() - started)
        summed = sum(run.nbytes for run in runs)
        figures = {"sums": name, "gb": round(summed / 1e9, 2), "ms": [round(1e3 * s, 2) for s in seconds]}
        print(json.dumps({**figures, "runs": len(runs), "gb_per_s": round(summed / 1e9 / min(seconds))}))


# --- deaths in the middle ------------------------------------------------------------


def model_folder(folder: Path) -> Path:
    """A checkpoint of random weights of the shape, with the tiny model's tokenizer."""
    model = random_model(SHAPE, "cuda", 1)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    for file in prepare("tiny").glob("*token*"):
        shutil.copy(file, folder)
    return folder


def placed(generators: int) -> dict[str, dict[str, str]]:
    """Process name → its variables. A GPU for each, as long as there are enough; on too few the first generators share
    the trainer's, the one that gets killed last. NCCL takes what shares a GPU on another host only."""
    beside = max(0, generators + 1 - torch.cuda.device_count())
    seen = {f"g{i}": dict.fromkeys([gpu(max(0, i + 1 - beside)), gpu(0)]) for i in range(generators)}
    made = {name: {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} for name, gpus in seen.items()}
    for i in range(beside):
        made[f"g{i}"]["NCCL_HOSTID"] = f"g{i}"
    made["trainer"] = {"CUDA_VISIBLE_DEVICES": gpu(0)}
    if os.environ.get("INFLIGHT_APART"):
        for name, variables in made.items():
            variables |= {"NCCL_HOSTID": name, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    return made


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[int], Serving]]:
    """Starts so many generators and, when the test is over, ends all and prints what they have logged."""
    with contextlib.ExitStack() as stack:

        def start(generators: int) -> Serving:
            eager = {"enforce_eager": True} if os.environ.get("INFLIGHT_EAGER") else {}
            config = RunConfig(
                model=ModelConfig(str(model_folder(tmp_path / "model")), "bfloat16"),
                task=TaskConfig("addition"),
                run_dir=str(tmp_path / "run"),
                generator=GeneratorConfig(
                    count=generators, kv_cache_gib=2.0, max_num_seqs=32, max_model_len=1100, threads=4, extra=eager
                ),
                bus=BusConfig(heartbeat_s=0.3, dead_after_s=10),
                publish=PublishConfig(
                    bucket_bytes=(1 if SHAPE == "tiny" else 64) << 20, transfer_timeout_s=4, supersede_after_s=1
                ),
            )
            stack.callback(print_logs, config.path)
            return stack.enter_context(Serving(config, placed(generators), ["-m", "tests.gpu.halting_generator"]))

        yield start


def print_logs(folder: Path) -> None:
    """The ends of all logs, without what vLLM tells of itself."""
    for log in sorted(folder.glob("*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if "inflight" in line or "rror" in line]
        print(f"--- {log.name}", *lines[-25:], sep="\n")


def test_a_trainer_killed_in_the_middle_over_nccl_then_over_ipc(serve: Callable[[int], Serving]) -> None:
    """One engine lives through both deaths; each time a new trainer continues."""
    serving = serve(1)
    trainer = serving.trainer(0, "nccl")
    trainer.committed(g0=0)
    trainer.publish(1)
    trainer.committed(g0=1)
    figures, _ = trainer_killed(serving, 1, "nccl", then="ipc", many=16)
    print(json.dumps(figures), flush=True)
    figures, _ = trainer_killed(serving, 3, "ipc", then="nccl", many=16)
    print(json.dumps(figures), flush=True)


def test_one_of_two_generators_killed_in_the_middle_over_nccl_then_over_ipc(serve: Callable[[int], Serving]) -> None:
    serving = serve(2)
    serving.trainer(0, "nccl").committed(g0=0, g1=0)
    print(json.dumps(generator_killed(serving, 0, "nccl", many=16)), flush=True)
    serving.trainers[-1].kill()
    serving.trainer(5, "ipc").committed(g0=5, g1=5)
    print(json.dumps(generator_killed(serving, 5, "ipc", many=16)), flush=True)
