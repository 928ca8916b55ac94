"""Does decoding wait while a version arrives? `python -m bench.receive`.

An engine in this process decodes without a pause; a publisher in another process sends version after version over gloo.
Each is received, verified and built by the receiver's thread beside the step loop, then committed between two steps.
Every step is counted under what the receiver did meanwhile. `lost` is what the steps of one version took beyond as many
idle steps. Both processes, and both threads of this one, share the machine's cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field

from bench.cpu_engine import DTYPES, Decoder, heading, spread
from bench.publish import machine
from inflight.bus import Link, Listener
from inflight.config import BusConfig, PublishConfig
from inflight.generator.settings import NO_VERSION, Settings
from inflight.messages import Commit, Committed, EngineHello, Finish
from inflight.models import prepare
from inflight.weights.receive.rank_state import ReceiverState

BUS = BusConfig(heartbeat_s=1.0, dead_after_s=60.0)
BATCH = 8
CONTEXT = 1024
IDLE_STEPS = 12
"""Steps between a swap and the next publish: their median is the base. The engine answers Commit only after them."""
JOIN_S = 120.0
WARM_UP = 2


@dataclass
class Steps:
    """Seconds of steps by what ran beside them."""

    by_state: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    """As the worker tells it: what `Committed` carries."""
    beside: list[float] = field(default_factory=list)
    """From the first bytes to ready."""


def publish(name: str, endpoint: str, versions: int) -> None:
    """The other process: publishes, waits until the engine says that the version is live, and again."""
    import torch
    from transformers import AutoModelForCausalLM

    from inflight.weights.publish.publisher import Publisher
    from inflight.weights.source import WeightSource

    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(prepare(name), dtype=torch.float32)
    config = PublishConfig(transport="gloo", join_timeout_s=JOIN_S)
    with Listener(endpoint, BUS) as listener:
        source = WeightSource(policy, DTYPES.get(name, "float32"))
        publisher = Publisher(source, listener, config, version=0, ranks={"g0": 1})
        publisher.wait_joined(JOIN_S)
        for version in range(1, versions + 1):
            publisher.publish(version)
            publisher.flush(config.transfer_timeout_s)
        stats = publisher.stats()
        publisher.finish("done")
        time.sleep(1)
        publisher.close()
    if stats["failures"]:
        raise SystemExit(f"{stats['failures']} versions failed")


class Watch:
    """Steps the engine, commits what is ready, and sorts the steps."""

    def __init__(self, decoder: Decoder, link: Link) -> None:
        self._decoder = decoder
        self._link = link
        self._receiver = decoder.worker.inflight_receiver
        self._idle: list[float] = []
        self._busy: list[float] = []
        self._busy_since: float | None = None
        self._answer: Committed | None = None
        self.version = 0

    def run(self) -> Steps:
        """Until the publisher says that it is done."""
        steps = Steps()
        while True:
            message = self._link.receive(0)
            if isinstance(message, Finish):
                return steps
            if isinstance(message, Commit):
                self._commit(message, steps)
            if self._decoder.left < 8:
                self._decoder.start()
            self._step(steps if self.version >= WARM_UP else Steps())

    def _step(self, steps: Steps) -> None:
        before = self._receiver.state
        seconds = self._decoder.step()
        after = self._receiver.state
        at_work = (ReceiverState.BUILDING, ReceiverState.RECEIVING)
        busy = next((state for state in at_work if state in (before, after)), None)
        steps.by_state[busy.name.lower() if busy else "idle"].append(seconds)
        if busy:
            self._busy_since = self._busy_since or time.perf_counter() - seconds
            self._busy.append(seconds)
        elif after is ReceiverState.IDLE:
            self._idle.append(seconds)
            if self._answer and len(self._idle) >= IDLE_STEPS:
                self._link.send(self._answer)
                self._answer = None

    def _commit(self, commit: Commit, steps: Steps) -> None:
        now = time.perf_counter()
        version = commit.version
        gap = self._decoder.engine.commit_weights(version)[0]["gap_s"]
        about = {"version": version, "attempt": commit.attempt, "publisher": commit.publisher}
        self._answer = Committed(**about, gap_s=gap, running=BATCH)
        self.version = version
        if version > WARM_UP and self._busy_since is not None:
            base = statistics.median(self._idle[-IDLE_STEPS:])
            steps.gap.append(gap)
            steps.lost.append(sum(self._busy) - base * len(self._busy))
            steps.beside.append(now - self._busy_since)
        self._idle = []
        self._busy = []
        self._busy_since = None


def measure(name: str, versions: int) -> Steps:
    """Runs both sides."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        endpoint = f"ipc://{folder}/w"
        settings = Settings(endpoint=endpoint, version=NO_VERSION, dead_after_s=BUS.dead_after_s)
        decoder = Decoder(prepare(name), name, BATCH, CONTEXT, settings)
        decoder.start()
        command = [sys.executable, "-m", "bench.receive", "--model", name, "--publish", endpoint]
        process = subprocess.Popen([*command, "--versions", str(versions + WARM_UP)])
        try:
            with Link(endpoint, "g0.engine", BUS) as link:
                link.send(EngineHello(generator="g0", world_size=1, url="none"))
                return Watch(decoder, link).run()
        finally:
            decoder.worker.inflight_receiver.close()
            process.terminate()
            process.wait(30)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="one engine per process: run it once for each")
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--publish", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(options.model, options.publish, options.versions)
        return
    where = machine()
    steps = measure(options.model, options.versions)
    rates = {name: BATCH / statistics.median(found) for name, found in steps.by_state.items()}
    lines = [
        f"| {name} | {len(found)} | {spread(found)} | {rates[name]:.0f} | {rates[name] / rates['idle']:.0%} |"
        for name, found in sorted(steps.by_state.items())
    ]
    print(f"""
{heading(f"Decoding while versions arrive, {options.model}", "bench.receive", where)}
{BATCH} sequences decoding on one thread, {len(steps.lost)} versions over gloo; medians (maxima), milliseconds.

| beside the step | steps | step | tokens/s | of idle |
|---|---|---|---|---|
{chr(10).join(lines)}

A version: received and built beside decoding in {spread(steps.beside)}; decode time lost to that
{spread(steps.lost)}; gap of the swap {spread(steps.gap)}.
""")


if __name__ == "__main__":
    main()
