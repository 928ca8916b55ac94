"""Tokens per second of a run with metrics and without, in alternation: `python -m bench.metrics_cost`.

    python -m bench.metrics_cost [--alternations 5] [--seconds 10] [--settle 4] [--limit-s 360]

Each run is a whole one (launcher, trainer, actor, a real vLLM on the CPU) of the tiny model, whose learning rate is so
small that answers keep their length. With `launch.metrics=true` every endpoint that the run announces is scraped once a
second, in the way of Prometheus: text with gzip, by the files in bus/targets. Without, nothing is served or scraped
(vLLM counts in both). Measured are the sampled tokens of the steps that end within `--seconds` after the first
`--settle` steps. The order is with, without, without, with, …, so that a machine that slows down does so for both.
No alternation is begun that would not be over within `--limit-s`. Prints a line of JSON: medians, all values, how many
alternations there were and how long the scrapes took; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from inflight.metrics import METRICS_FILE, read_lines

LIMIT_S = 180.0
"""Until a run has taken its first steps; a run that takes longer ends the bench."""
SETTINGS = (
    "trainer.steps=1000000",
    "trainer.learning_rate=1e-9",
    "trainer.checkpoint_every=0",
    "audit.keep_versions=false",
    "rollout.keep=false",
    "bus.heartbeat_s=0.5",
)
HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
    "Accept-Encoding": "gzip",
}
"""Prometheus's, so that the processes do what they do for it."""


class Scrapes(threading.Thread):
    """Scrapes all processes of a run once a second, until `end` is called."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(name="scrapes", daemon=True)
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        """Process → milliseconds of each scrape."""
        self._targets = run_dir / "bus" / "targets"
        self._over = threading.Event()
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def run(self) -> None:
        """In the thread."""
        due = time.monotonic()
        while not self._over.wait(max(due - time.monotonic(), 0.0)):
            due = max(due + 1.0, time.monotonic())
            for file in sorted(self._targets.glob("*.json")):
                (entry,) = json.loads(file.read_text())
                self._scrape(entry["labels"]["process"], entry["targets"][0])

    def _scrape(self, process: str, address: str) -> None:
        began = time.perf_counter()
        request = urllib.request.Request(f"http://{address}/metrics", headers=HEADERS)
        with self._direct.open(request, timeout=10) as reply:
            reply.read()
        self.took[process].append((time.perf_counter() - began) * 1e3)

    def end(self) -> None:
        """Waits for the scrape that is under way."""
        self._over.set()
        self.join(timeout=30)


def measured(run_dir: Path, metrics: bool, seconds: float, settle: int) -> tuple[float, Scrapes]:
    """Tokens per second of a run, and its scrapes. Raises RuntimeError when the run does not work."""
    asked = [f"run_dir={run_dir}", f"launch.metrics={str(metrics).lower()}", *SETTINGS]
    command = [sys.executable, "-m", "inflight.launcher", "--config-name", "tiny", *asked]
    scrapes = Scrapes(run_dir)
    with (run_dir.parent / f"{run_dir.name}.log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(launcher, run_dir, settle, LIMIT_S)
            if metrics:
                scrapes.start()
            time.sleep(seconds)
            if metrics:
                scrapes.end()
            lines = read_lines(run_dir / METRICS_FILE)[settle - 1 :]
            if launcher.poll() is not None or len(lines) < 2:
                raise RuntimeError(f"the run took no steps: {Path(log.name).read_text()[-2000:]}")
        finally:
            _end(launcher)
    tokens = sum(line["tokens_trained"] + line["tokens_masked"] for line in lines[1:])
    return tokens / (lines[-1]["time"] - lines[0]["time"]), scrapes


def _wait_for(launcher: subprocess.Popen[bytes], run_dir: Path, steps: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while len(read_lines(run_dir / METRICS_FILE)) < steps:
        if launcher.poll() is not None or time.monotonic() > deadline:
            log = (run_dir.parent / f"{run_dir.name}.log").read_text()[-2000:]
            raise RuntimeError(f"no {steps} steps within {limit_s:g} s: {log}")
        time.sleep(0.1)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """All processes of the run end with it. Children of what a shell runs in its background ignore SIGINT."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=60)


def compared(alternations: int, seconds: float, settle: int, limit_s: float) -> dict[str, Any]:
    """The figures of so many runs of each kind, or of as many as there is time for."""
    found: dict[bool, list[float]] = {True: [], False: []}
    took: defaultdict[str, list[float]] = defaultdict(list)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(alternations):
            if number and (time.monotonic() - began) * (number + 1) / number > limit_s:
                break
            for metrics in (True, False) if number % 2 == 0 else (False, True):
                run_dir = Path(folder) / f"{number}-{'with' if metrics else 'without'}"
                speed, scrapes = measured(run_dir, metrics, seconds, settle)
                found[metrics].append(round(speed, 1))
                for process, each in scrapes.took.items():
                    took[process] += each
                said = f"{run_dir.name}: {speed:.1f} tokens/s, {time.monotonic() - began:.0f} s since the begin"
                print(said, file=sys.stderr, flush=True)
    medians = {metrics: statistics.median(speeds) for metrics, speeds in found.items()}
    return {
        "tokens_per_s": {"with": medians[True], "without": medians[False]},
        "with_to_without": round(medians[True] / medians[False], 4),
        "all": {"with": found[True], "without": found[False]},
        "scrape_ms": {process: _of(each) for process, each in sorted(took.items())},
        "alternations": len(found[True]),
        "seconds": seconds,
        "cores": len(os.sched_getaffinity(0)),
    }


def _of(took: list[float]) -> dict[str, float]:
    ordered = sorted(took)
    figures = {"median": statistics.median(took), "p99": ordered[int(0.99 * (len(took) - 1))], "max": ordered[-1]}
    return {**{name: round(value, 2) for name, value in figures.items()}, "scrapes": len(took)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured of each run")
    parser.add_argument("--settle", type=int, default=4, help="steps before the measurement begins; at least 1")
    parser.add_argument("--limit-s", type=float, default=360.0, help="of the whole")
    given = parser.parse_args()
    print(json.dumps(compared(given.alternations, given.seconds, given.settle, given.limit_s)), flush=True)


if __name__ == "__main__":
    main()
