"""What a version costs beside its bytes: threads, sockets and the event loop between `publish` and `Committed`.

    python -m bench.handover                         an adapter of 392 small matrices, both processes idle
    python -m bench.handover --serving-ms 3          the generator's event loop computes 3 ms of every step
    python -m bench.handover --training              the trainer's process holds the GIL as often as it gets it

One generator of one rank, in another process, with the agent that a real one has; its engine swaps between two "steps"
of `--step-ms`, or at once. Prints one line of JSON: medians and 90th percentiles in milliseconds of what is in
weights/publish/events.py; `rest_of_ready` is `ready` without transfer and build, `commit` includes the engine's steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bench.publish import BUS, ByteShadow
from inflight.bus import Link, Listener
from inflight.config import PublishConfig
from inflight.generator.agent import EngineAgent
from inflight.messages import EngineHello, RankHello
from inflight.weights.publish.events import Swap
from inflight.weights.publish.publisher import Publisher
from inflight.weights.receive.receiver import WeightReceiver
from inflight.weights.source import WeightSource

MATRICES = 392
"""Of an adapter on all linear layers of 28 layers."""
WARM_UP = 5


def spin(seconds: float) -> None:
    """Computes in Python, as the server does with the tokens of a step."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(50))


def train(ended: threading.Event) -> None:
    """Computes in Python until the end."""
    while not ended.is_set():
        spin(0.1)


class Core:
    """An engine core that swaps behind the step in progress and the one that is queued, and answers then."""

    def __init__(self, receiver: WeightReceiver, step_s: float) -> None:
        self._receiver = receiver
        self._step_s = step_s

    async def commit(self, _: str, version: int) -> list[dict[str, Any]]:
        """`commit_weights`."""
        if self._step_s:
            now = time.perf_counter()
            await asyncio.sleep(self._step_s * (2 - now / self._step_s % 1))
        return [{"gap_s": self._receiver.swap(version)}]


async def generate(endpoint: str, step_s: float, serving_s: float) -> None:
    """Rank, engine and event loop of g0, until its process is ended."""
    rank = Link(endpoint, "g0.r0", BUS)
    receiver = WeightReceiver(rank, ByteShadow(), RankHello(generator="g0", rank=0, world_size=1))
    receiver.start()
    counted = SimpleNamespace(get_num_unfinished_requests=lambda: 64)
    core = SimpleNamespace(call_utility_async=Core(receiver, step_s).commit)
    engine: Any = SimpleNamespace(engine_core=core, output_processor=counted)
    hello = EngineHello(generator="g0", world_size=1, url="http://127.0.0.1:1")
    with Link(endpoint, "g0.engine", BUS) as link:
        agent = asyncio.ensure_future(EngineAgent(link, engine, hello, 60.0).run())
        while not agent.done():
            spin(serving_s)
            await asyncio.sleep(max(0.001, step_s - serving_s))


def measure(options: argparse.Namespace) -> list[Swap]:
    """The swaps of `--versions`."""
    adapter = nn.ParameterDict({f"m{number:03d}": torch.zeros(8, 64) for number in range(MATRICES)})
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Listener(f"ipc://{folder}/w", BUS) as listener:
        config = PublishConfig(transport="gloo", checksum="auto")
        publisher = Publisher(WeightSource(adapter, "float32"), listener, config, version=0, ranks={"g0": 1})
        passed = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in ("step_ms", "serving_ms")]
        process = subprocess.Popen([sys.executable, __file__, "--generate", listener.endpoint, *passed])
        ended = threading.Event()
        if options.training:
            threading.Thread(target=train, args=(ended,), daemon=True).start()
        try:
            publisher.wait_joined(config.join_timeout_s)
            for version in range(1, WARM_UP + options.versions + 1):
                publisher.publish(version)
                publisher.flush(config.transfer_timeout_s)
                time.sleep(0.0137)  # at another moment of a step
        finally:
            ended.set()
            publisher.close()
            process.kill()
            process.wait(10)
    return [event for event in publisher.events if isinstance(event, Swap)][1 + WARM_UP :]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=0.0, help="of the engine; 0: it swaps at once")
    parser.add_argument("--serving-ms", type=float, default=0.0, help="of each step, in the generator's event loop")
    parser.add_argument("--training", action="store_true", help="the trainer's main thread computes in Python")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.generate:
        asyncio.run(generate(options.generate, options.step_ms / 1e3, options.serving_ms / 1e3))
        return
    swaps = measure(options)
    phases = {
        "ready": [each.ready_s for each in swaps],
        "transfer": [each.transfer_s for each in swaps],
        "rest_of_ready": [each.ready_s - each.transfer_s - each.build_s for each in swaps],
        "commit": [each.commit_s for each in swaps],
        "both": [each.ready_s + each.commit_s for each in swaps],
    }
    found = {
        name: [round(1e3 * statistics.median(values), 2), round(1e3 * statistics.quantiles(values, n=10)[-1], 2)]
        for name, values in phases.items()
    }
    print(json.dumps({"options": sys.argv[1:], "load": round(os.getloadavg()[0], 1), "median_and_p90_ms": found}))


if __name__ == "__main__":
    main()
