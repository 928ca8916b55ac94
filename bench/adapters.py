"""How much does an update of a LoRA adapter disturb the sequences that decode with it, as a client sees it?

    python -m bench.adapters                        one GPU for both sides, 7B shape, r = 32 on all linear layers
    python -m bench.adapters --trainer-device cuda:1
    python -m bench.adapters --updates 50 --shape 1.5b
    python -m bench.adapters --interval 0.2 0.02 --round-s 20 6
    python -m bench.adapters --shape tiny --device cpu --updates 20 --batch 4

Updates come every `--interval` seconds; with several intervals the same engine is measured at each in turn. The figure
of one update is the longest gap between two tokens of a sequence from the order to publish until three steps after the
commit, less the median gap; `control` is the same over as many steps half an interval later, where there was no
update. An update is committed when the publisher knows that all ranks have swapped. In the same call vLLM's own way is
measured: `add_lora` of an adapter in place (`load_inplace`), from files in /dev/shm. Percentiles come with a 90 %
interval of 2000 bootstrap samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_engine import Agent, Client, start_engine
from bench.gpu_gaps import Timeline, percentile
from bench.gpu_report import phases
from bench.gpu_shapes import save_adapter, write_config
from bench.gpu_strategies import TrainerProcess
from inflight.generator.settings import FIRST_ADAPTER, NO_VERSION, Settings

WORKERS = {
    "cuda": "inflight.generator.worker.adapter_cuda.InflightCUDAAdapterWorker",
    "cpu": "inflight.generator.worker.adapter_cpu.InflightCPUAdapterWorker",
}
ON_CUDA = {"gpu_memory_utilization": 0.75, "distributed_executor_backend": "mp"}
ON_CPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
WAIT_S = 120.0
SETTLE_STEPS = 3
SAMPLES = 2000
OWN = 1
"""The id of the adapter that vLLM loads itself."""

Change = Callable[[int], None]
"""Makes version n live; returns when it is."""


def interval90(values: list[float], share: float) -> list[float]:
    """The 90 % interval of a percentile over bootstrap samples."""
    import numpy as np

    drawn = np.random.default_rng(0).choice(values, (SAMPLES, len(values)))
    found = np.sort([percentile(list(each), share) for each in drawn])
    return [round(float(found[int(at * SAMPLES)]), 3) for at in (0.05, 0.95)]


def spread(values: list[float]) -> dict[str, Any]:
    """Percentiles of milliseconds."""
    return {
        "p50": round(percentile(values, 0.5), 3),
        "p99": round(percentile(values, 0.99), 3),
        "p99_90": interval90(values, 0.99),
        "max": round(max(values), 3),
    }


class Cell:
    """One way to update, on rounds of fresh sequences; a round without updates is what it is compared with."""

    def __init__(self, client: Client, batch: int, settle_s: float, interval: float, round_s: float) -> None:
        self._client = client
        self._batch = batch
        self._settle_s = settle_s
        self._interval = interval
        self._round_s = round_s

    def run(self, name: str, updates: int, change: Change, first: int) -> dict[str, Any]:
        """The figures of `updates` updates, versions from `first` on."""
        quiet = self._round(0, lambda _: None, 0)
        a_round = max(1, int(self._round_s / self._interval))
        extra: list[float] = []
        control: list[float] = []
        took: list[float] = []
        spent_s = 0.0
        kept: list[float] = []
        while len(took) < updates:
            count = min(a_round, updates - len(took))
            timeline, began, moments = self._round(count, change, first + len(took))
            length = count * self._interval
            kept.append(timeline.rate(began, began + length) / quiet[0].rate(quiet[1], quiet[1] + length))
            spent_s += max(length, moments[-1][1] - began)
            for start, end in moments:
                took.append(1e3 * (end - start))
                stop = timeline.following(end, SETTLE_STEPS)
                half = self._interval / 2
                median = statistics.median(timeline.gaps(start - half, start + half))
                extra.append(1e3 * (max(timeline.gaps(start, stop)) - median))
                if gaps := timeline.gaps(start + half, stop + half):
                    control.append(1e3 * (max(gaps) - median))
        return {
            "way": name,
            "updates": len(took),
            "interval_s": self._interval,
            "updates_per_s": round(len(took) / spent_s, 2),
            "extra_gap_ms": spread(extra),
            "control_gap_ms": spread(control),
            "controls": len(control),
            "publish_to_commit_ms": spread(took),
            "aborted": self._client.aborted,
            "throughput_kept": round(statistics.mean(kept), 4),
            "base_gap_ms": round(1e3 * statistics.median(quiet[0].gaps(quiet[1], quiet[1] + self._round_s)), 3),
            "tokens_per_s_without": round(quiet[0].rate(quiet[1], quiet[1] + self._round_s), 1),
            "extra_gap_raw_ms": [round(value, 3) for value in extra],
            "control_gap_raw_ms": [round(value, 3) for value in control],
        }

    def _round(self, count: int, change: Change, first: int) -> tuple[Timeline, float, list[tuple[float, float]]]:
        client = self._client
        client.timeline = timeline = Timeline()
        client.start(self._batch)
        time.sleep(self._settle_s)
        began = time.perf_counter()
        moments = []
        for number in range(count):
            time.sleep(max(0.0, began + number * self._interval - time.perf_counter()))
            start = time.perf_counter()
            change(first + number)
            moments.append((start, time.perf_counter()))
        length = count * self._interval if count else self._round_s
        time.sleep(max(0.0, began + length + self._interval - time.perf_counter()))
        client.stop()
        return timeline, began, moments


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM's engine arguments."""
    cuda = arguments.device == "cuda"
    return {
        "max_model_len": 8192 if cuda else 512,
        "max_num_seqs": max(8, arguments.batch),
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": arguments.rank,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        **(ON_CUDA if cuda else ON_CPU),
        **({"kv_cache_memory_bytes": int(arguments.kv_cache_gib * 2**30)} if arguments.kv_cache_gib else {}),
        **({"enforce_eager": True} if arguments.eager else {}),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Both ways on one engine, with the trainer in a process of its own."""
    from vllm.lora.request import LoRARequest

    cuda = arguments.device == "cuda"
    endpoint = f"ipc://{folder / 'weights'}"
    trainer = TrainerProcess(
        {
            "shape": arguments.shape,
            "device": arguments.trainer_device if cuda else "cpu",
            "endpoint": endpoint,
            "transport": "ipc" if cuda else "gloo",
            "bucket_mb": 64,
            "ranks": arguments.tensor_parallel_size,
            "checksum": arguments.checksum,
            "transfer_timeout_s": WAIT_S,
            "adapter_rank": arguments.rank,
        },
        dict(os.environ),
    )
    try:
        trainer.answer(600)  # ready; the engine plans its memory by what is free
        settings = Settings(endpoint=endpoint, generator="g0", version=NO_VERSION, adapters=["policy"])
        model = write_config(arguments.shape, folder / "model")
        client = Client(
            start_engine(str(model), engine_options(arguments), settings, WORKERS[arguments.device]),
            8000 if cuda else 480,
            cuda=cuda,
            lora=LoRARequest("policy", FIRST_ADAPTER, "inflight://policy"),
        )
        agent = Agent(client, endpoint, arguments.tensor_parallel_size, patched=True, adapter=FIRST_ADAPTER)
        trainer.ask("join")

        rounds = list(zip(arguments.interval, arguments.round_s, strict=True))

        def cell(number: int) -> Cell:
            return Cell(client, arguments.batch, arguments.settle_s, *rounds[number])

        cells = []
        for number in range(len(rounds)):
            cells.append(slots(cell(number), trainer, agent, arguments.updates, 1 + number * arguments.updates))
            show(cells[-1])
        own = save_adapter(arguments.shape, arguments.rank, folder / "own", arguments.device)
        client.lora = LoRARequest("own", OWN, str(own))
        in_place = LoRARequest("own", OWN, str(own), load_inplace=True)
        load: Change = lambda _: client.call("add_lora", in_place)  # noqa: E731
        if arguments.own_updates:
            cells.append(cell(0).run("add_lora in place", arguments.own_updates, load, 0))
            show(cells[-1])
        agent.close()
        client.core.shutdown()
        return cells
    finally:
        trainer.close()


def slots(cell: Cell, trainer: TrainerProcess, agent: Agent, updates: int, first: int) -> dict[str, Any]:
    """The figures of published versions from `first` on, with the medians of their phases."""
    packed: list[float] = []
    already = len(trainer.ask("swaps")["swaps"])

    def publish(version: int) -> None:
        packed.append(trainer.ask("publish", version=version, commit_within_s=WAIT_S)["pack_s"])

    figures = cell.run("slots", updates, publish, first)
    agent.wait(first + updates - 1, WAIT_S)
    return {**figures, "phases_ms": phases(packed, trainer.ask("swaps")["swaps"][already:])}


def show(cell: dict[str, Any]) -> None:
    """One line of JSON, without what was measured of each update."""
    print(json.dumps({key: value for key, value in cell.items() if "raw" not in key}), flush=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import vllm

    card = "CPU"
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"card": card, "torch": torch.__version__, "vllm": vllm.__version__, "python": platform.python_version()}


def main() -> None:
    """Measures and writes `adapters.json` under `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--device", default="cuda", choices=list(WORKERS))
    parser.add_argument("--trainer-device", default="cuda:0", help="cuda:1: a GPU for each side")
    parser.add_argument("--kv-cache-gib", type=float, default=0.0, help="0: what is left of 75 %% of the memory")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--own-updates", type=int, default=60, help="of vLLM's own way; 0: not measured")
    parser.add_argument("--interval", type=float, nargs="+", default=[0.2], help="seconds, or several")
    parser.add_argument("--round-s", type=float, nargs="+", default=[20.0], help="of a round, for each")
    parser.add_argument("--settle-s", type=float, default=1.5)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--checksum", default="auto", choices=["auto", "always", "none"])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--out", default="bench/out/adapters")
    arguments = parser.parse_args()
    if len(arguments.interval) != len(arguments.round_s):
        parser.error(f"--interval has {len(arguments.interval)} values and --round-s {len(arguments.round_s)}")
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="adapters-", dir=shared))
    try:
        report = {"machine": machine(), "arguments": vars(arguments), "cells": measure(arguments, folder)}
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "adapters.json").write_text(json.dumps(report, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
