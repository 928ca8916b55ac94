"""How long Prometheus waits for a scrape of the trainer, over HTTP on loopback.

    python -m bench.scrape [--steps 1000] [--scrapes 300]

The trainer's metrics after `--steps` steps with 8 generators, 64 lags and 20 reasons, once alone and once beside a
thread of this process that computes in Python all the time, as a trainer's may. It is asked with the headers of
Prometheus. Prints a JSON line each: median, 99th percentile and maximum in ms, CPU time of client and server together
per scrape, and the size of an answer on the wire.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bench.metrics_cost import HEADERS
from inflight.launcher.compose import compose
from inflight.prometheus.endpoint import MetricsEndpoint
from inflight.rollout.books import Counts
from inflight.trainer.exported import TrainerMetrics
from inflight.weights.publish.events import Swap

GENERATORS = [f"g{number}" for number in range(8)]
LINE = {
    "reward": 0.5,
    "reward_all": 0.4,
    "loss": 0.1,
    "grad_norm": 1.0,
    "learning_rate": 1e-6,
    "entropy": 1.2,
    "kl": 0.01,
    "ess": 0.97,
    "tokens_per_s": 5000.0,
    "wait_s": 0.5,
    "train_s": 3.0,
    "publish_wait_s": 0.1,
    "pack_s": 0.05,
    "guard_s": 0.01,
    "tokens_trained": 30000,
    "tokens_masked": 500,
    "lag_counts": dict.fromkeys(range(64), 500),
    "tokens_masked_by_rule": {f"rule {number}": 10 for number in range(10)},
}


def filled(metrics: TrainerMetrics, steps: int) -> None:
    """As after `steps` steps."""
    reasons = {f"reason {number}": 7 for number in range(20)}
    counts = Counts(
        granted=900,
        in_flight=8,
        produced=800,
        buffered=12,
        trained=700,
        dropped=reasons,
        failed=reasons,
        rollouts_dropped=reasons,
        ignored={},
    )
    versions = dict.fromkeys(GENERATORS, steps)
    publisher = SimpleNamespace(version=steps, committed=versions, behind=dict.fromkeys(GENERATORS, 0))
    buffer = SimpleNamespace(counts=lambda: counts, ages=lambda _: dict.fromkeys(range(8), 2))
    metrics.follow(cast(Any, publisher), cast(Any, buffer))
    for step in range(1, steps + 1):
        metrics.step({"step": step, **LINE})
        for name in GENERATORS:
            metrics.event(Swap(name, step, 0.8, 0.1, 1.0, 0.01, 0.0004, 64))


def scraped(port: int, times: int) -> dict[str, float]:
    """Durations of scrapes, one after the other."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=HEADERS)
    took = []
    size = 0
    used = time.process_time()
    for _ in range(times):
        began = time.perf_counter()
        with direct.open(asked, timeout=30) as reply:
            size = len(reply.read())
        took.append((time.perf_counter() - began) * 1e3)
    ordered = sorted(took)
    cpu = (time.process_time() - used) * 1e3 / times
    figures = {
        "cpu_ms": cpu,
        "median_ms": statistics.median(took),
        "p99_ms": ordered[int(0.99 * (times - 1))],
        "max_ms": ordered[-1],
    }
    return {**{name: round(value, 2) for name, value in figures.items()}, "bytes": size}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=300)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = compose("tiny", [f"run_dir={folder}/run", "generator.count=8"])
        (Path(folder) / "run" / "bus").mkdir(parents=True)
        metrics = TrainerMetrics(config)
        filled(metrics, given.steps)
        with MetricsEndpoint(config, "trainer", metrics.registry) as endpoint:
            scraped(endpoint.port, 10)
            print(json.dumps({"beside": "nothing", **scraped(endpoint.port, given.scrapes)}), flush=True)
            over = threading.Event()
            busy = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(over.is_set, True)])
            busy.start()
            try:
                print(json.dumps({"beside": "a busy thread", **scraped(endpoint.port, given.scrapes)}), flush=True)
            finally:
                over.set()
                busy.join()


if __name__ == "__main__":
    main()
