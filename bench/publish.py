"""How long a publish keeps the trainer, and how fast gloo carries the bytes: `python -m bench.publish`.

The trainer holds random float32 weights of SmolLM2-135M's shape, here; one rank, in another process, receives them in
bfloat16 into a shadow that keeps the bytes and nothing else. Prints a Markdown block, medians over `--rounds`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from inflight.bus import Link, Listener
from inflight.config import BusConfig, PublishConfig
from inflight.messages import Commit, Committed, EngineHello, Manifest, RankHello
from inflight.weights.publish.events import Failure, Swap
from inflight.weights.publish.publisher import Publisher, PublishReport
from inflight.weights.receive.receiver import WeightReceiver
from inflight.weights.source import WeightSource

BUS = BusConfig(heartbeat_s=1.0, dead_after_s=60.0)
WARM_UP = 2


class ByteShadow:
    """A Shadow that keeps the bytes of a version as they came."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The same buffer each time, as a generator's."""
        if self._buffer.numel() != manifest.total_bytes:
            self._buffer = torch.empty(manifest.total_bytes, dtype=torch.uint8)
        return self._buffer

    def build(self) -> None:
        """Bytes are all it keeps."""

    def swap(self) -> float:
        """Nothing to exchange."""
        return 0.0

    def discard(self) -> None:
        """Nothing to forget."""


def receive(endpoint: str) -> None:
    """The other process: rank and engine of g0, until the publisher's process ends it."""
    link = Link(endpoint, "g0.r0", BUS)
    receiver = WeightReceiver(link, ByteShadow(), RankHello(generator="g0", rank=0, world_size=1))
    receiver.start()
    with Link(endpoint, "g0.engine", BUS) as engine:
        engine.send(EngineHello(generator="g0", world_size=1, url="none"))
        while True:
            message = engine.receive(1.0)
            if isinstance(message, Commit):
                about = {"version": message.version, "attempt": message.attempt, "publisher": message.publisher}
                engine.send(Committed(**about, gap_s=receiver.swap(message.version), running=0))


def random_model() -> nn.Module:
    """SmolLM2-135M's parameters in float32, with random values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").float()
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    return model


def measure(
    model: nn.Module, config: PublishConfig, rounds: int, *, back_to_back: bool
) -> tuple[int, list[PublishReport], list[Swap]]:
    """(bytes, reports, swaps) of `rounds` publishes, after a few to warm up."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Listener(f"ipc://{folder}/w", BUS) as listener:
        source = WeightSource(model, "bfloat16")
        publisher = Publisher(source, listener, config, version=0, ranks={"g0": 1})
        command = [sys.executable, "-m", "bench.publish", "--receive", listener.endpoint]
        process = subprocess.Popen(command)
        try:
            publisher.wait_joined(config.join_timeout_s)
            reports = []
            for version in range(1, WARM_UP + rounds + 1):
                reports.append(publisher.publish(version))
                if not back_to_back:
                    publisher.flush(config.transfer_timeout_s)
            publisher.flush(config.transfer_timeout_s)
        finally:
            publisher.close()
            process.kill()
            process.wait(10)
    failures = [event for event in publisher.events if isinstance(event, Failure)]
    if failures:
        raise SystemExit(f"not all versions arrived: {failures[0]}")
    swaps = [event for event in publisher.events if isinstance(event, Swap)]
    return publisher.manifest.total_bytes, reports[WARM_UP:], swaps[1 + WARM_UP :]  # the first is version 0's


def row(name: str, total_bytes: int, reports: list[PublishReport], swaps: list[Swap]) -> str:
    """One line of the table; times in milliseconds."""
    cells = [
        [report.wait_s for report in reports],
        [report.pack_s for report in reports],
        [report.wait_s + report.pack_s for report in reports],
        [swap.transfer_s for swap in swaps],
        [swap.ready_s + swap.commit_s for swap in swaps],
    ]
    rate = total_bytes / statistics.median(swap.transfer_s for swap in swaps) / 1e9
    columns = [f"{statistics.median(cell) * 1e3:.1f} ({max(cell) * 1e3:.0f})" for cell in cells]
    return f"| {name} | {' | '.join(columns)} | {rate:.2f} |"


def machine() -> str:
    """Processor, cores and how busy they are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    load = os.getloadavg()[0]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, load {load:.1f} at the start"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of the trainer's process")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.receive else options.threads)
    if options.receive:
        receive(options.receive)
    where = machine()
    model = random_model()
    rows = []
    total_bytes = 0
    for checksum in ("auto", "none"):
        for back_to_back in (False, True):
            config = PublishConfig(transport="gloo", bucket_bytes=options.bucket_mib << 20, checksum=checksum)
            total_bytes, *measured = measure(model, config, options.rounds, back_to_back=back_to_back)
            name = f"{checksum}, {'at once again' if back_to_back else 'after the swap'}"
            rows.append(row(name, total_bytes, *measured))
    print(f"""
### Publishing SmolLM2-135M ({total_bytes / 1e6:.0f} MB in bfloat16) over gloo

{where}; Python {platform.python_version()}, torch {torch.__version__}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d};
`{shlex.join(["python", "-m", "bench.publish", *sys.argv[1:]])}`. Medians (maxima) of {options.rounds}, milliseconds.

| checksum, next publish | trainer waits | packs | blocked | transfer, verified | packed to committed | GB/s |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}
""")


if __name__ == "__main__":
    main()
