"""Does it learn as well when tokens are old, and how much sooner? Whole runs under several policies, over seeds.

    python -m bench.learning                               the tiny model on a CPU
    python -m bench.learning --config-name learning_gpu    SmolLM2 on GPUs

Each run is `inflight launch` with the overrides of its cell. Results: JSON, Markdown and, where matplotlib is
installed, plots of the reward against wall time, tokens and steps under `out`, written after each run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import psutil
from omegaconf import DictConfig, OmegaConf

from bench.learning_report import DONE_FILE, Curve, read_curve, write_report
from inflight.metrics import SUMMARY_FILE

STOP_S = 60.0
"""A run that is asked to end is killed after as long."""


def run_cell(config: DictConfig, name: str, seed: int, folder: Path) -> str:
    """One run, unless its folder is complete: empty, or one line that says why it did not come to its end."""
    if complete(folder):
        return ""
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.failed-{int(time.time())}"))
    command = [
        sys.executable,
        "-m",
        "inflight.launcher",
        "--config-name",
        config.base,
        *config.common,
        *config.cells[name],
        f"seed={seed}",
        f"run_dir={folder.resolve()}",
    ]
    log = folder.with_name(f"{folder.name}.log")
    with _locked(config.lock), _others() as others:
        failure = _run(command, log, config.timeout_s)
    if failure:
        return f"{name}, seed {seed}: {failure} (all it said: {log})"
    (folder / DONE_FILE).write_text(json.dumps(others) + "\n")
    return ""


def _run(command: list[str], log: Path, timeout_s: float) -> str:
    """Waits for a command that writes to `log`: empty, or what went wrong. What runs too long is asked to end first."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends what it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            return f"not done within timeout_s={timeout_s:g}"
    said = log.read_text(errors="replace").strip().splitlines() or ["nothing was said"]
    return "" if code == 0 else f"exit code {code}: {said[-1][:300]}"


def complete(folder: Path) -> bool:
    """Whether it holds a run that came to its end."""
    return (folder / SUMMARY_FILE).is_file() and (folder / DONE_FILE).is_file()


@contextlib.contextmanager
def _others() -> Iterator[dict[str, float]]:
    """Fills in `others_cpu`: the share of this machine's processors that other processes took meanwhile."""

    def reading() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), sum(times) - times.idle - times.iowait, own.ru_utime + own.ru_stime

    found: dict[str, float] = {}
    began, busy, own = reading()
    yield found
    ended, busy_now, own_now = reading()
    seconds = (ended - began) * psutil.cpu_count()
    found["others_cpu"] = round(max(0.0, (busy_now - busy) - (own_now - own)) / seconds, 3)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Holds the file's lock; without a path nothing happens."""
    if not path:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@hydra.main(version_base=None, config_path="configs", config_name="learning")
def main(config: DictConfig) -> None:
    """All cells of a seed before the next seed, so that a bench that is cut short still compares like with like.

    A run that fails keeps none of the others from theirs; the exit code is 1 then.
    """
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[Curve]] = {}
    failures: list[str] = []
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "config": OmegaConf.to_container(config, resolve=True),
    }
    for seed in config.seeds:
        for name in config.only or config.cells:
            folder = out / "runs" / f"{name}-{seed}"
            if not config.report_only and (failure := run_cell(config, name, seed, folder)):
                print(failure, file=sys.stderr, flush=True)
                failures.append(failure)
            if not complete(folder):
                continue
            curve = read_curve(folder, config.smooth, seed)
            curves.setdefault(name, []).append(curve)
            print(json.dumps({"cell": name, "seed": seed, **curve.figures()}), flush=True)
            write_report(report, curves, out, config.baseline)
    if failures:
        raise SystemExit("\n".join([f"{len(failures)} runs did not come to their end:", *failures]))


if __name__ == "__main__":
    main()
