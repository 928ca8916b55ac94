"""How much does an update of its weights disturb a decoding engine, as a client sees it?

    python -m bench.interruption                       two GPUs: trainer and engine, 7B shape
    python -m bench.interruption trainer_devices=0 engine_devices=0    one GPU for both (no vLLM-native cells)
    python -m bench.interruption --config-name interruption_cpu

Figures per update: the extra time between two tokens at the client (longest gap around the swap less the median gap
before the update), the decode time lost over the whole update, what the trainer waited. `control` is the same
figure where there was no update. Results: JSON, Markdown and plots under `out`, written after each cell.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from bench.gpu_gaps import Timeline, Update, summarize
from bench.gpu_report import phases, write_report
from bench.gpu_shapes import write_config
from bench.gpu_soak import memory
from bench.gpu_trace import Trace, late, show
from bench.native_sender import worker_info
from inflight.generator.engine_args import CPU_WORKER

COMPARED_WORKER = "bench.compared_worker.ComparedWorker"
TRACED_WORKER = "bench.traced_worker.TracedWorker"
NATIVE = {"vllm-packed", "vllm-per-tensor", "drain", "abort"}


class Run:
    """Both processes, and the cells one after the other."""

    def __init__(self, config: DictConfig) -> None:
        from bench.gpu_strategies import Bench, TrainerProcess

        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="interruption-"))
        self._version = 0
        self._quiet: dict[tuple[int, bool], tuple[float, Timeline]] = {}
        self.timelines: dict[str, tuple[Timeline, list[Update]]] = {}
        self._trace: Trace | None = None
        endpoint = f"ipc://{self._folder / 'weights'}"
        trainer = TrainerProcess(self._trainer_options(endpoint), self._environment(config.trainer_devices))
        try:
            shared = str(config.trainer_devices) == str(config.engine_devices)
            if shared:  # the engine plans its memory by what is free
                trainer.answer()
            engine = self._engine(endpoint)
            if not shared:
                trainer.answer()  # ready
            self._bench = Bench(engine, trainer, None, self._native_info())
            self._join(endpoint)
        except BaseException:
            trainer.close()
            raise

    def _trainer_options(self, endpoint: str) -> dict[str, Any]:
        config = self._config
        cuda = config.device == "cuda"
        return {
            "shape": config.shape,
            "device": "cuda:0" if cuda else "cpu",
            "endpoint": endpoint,
            "transport": config.transport,
            "bucket_mb": config.bucket_mb,
            "ranks": config.tensor_parallel_size,
            "checksum": config.checksum,
            "transfer_timeout_s": config.transfer_timeout_s,
        }

    @staticmethod
    def _environment(devices: str) -> dict[str, str]:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(devices)}

    def _engine(self, endpoint: str) -> Any:
        from bench.gpu_engine import Client, start_engine
        from inflight.generator.settings import NO_VERSION, Settings

        config = self._config
        os.environ["CUDA_VISIBLE_DEVICES"] = str(config.engine_devices)
        options: dict[str, Any] = dict(config.engine)
        options["tensor_parallel_size"] = config.tensor_parallel_size
        if self._wants_native():
            from vllm.config.weight_transfer import WeightTransferConfig

            options["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
        model = write_config(config.shape, self._folder / "model")
        settings = Settings(endpoint=endpoint, generator="g0", version=NO_VERSION, swap=config.swap)
        on_cuda = TRACED_WORKER if config.trace else COMPARED_WORKER
        worker = on_cuda if config.device == "cuda" else CPU_WORKER
        engine = start_engine(str(model), options, settings, worker)
        return Client(engine, config.tokens, cuda=config.device == "cuda", prompt_tokens=config.prompt_tokens)

    def _wants_native(self) -> bool:
        return any(cell.strategy in NATIVE for cell in self._config.cells)

    def _native_info(self) -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        from bench.gpu_shapes import config_of

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(self._config.shape), dtype=torch.bfloat16)
        named = list(model.named_parameters())
        return {
            "names": [name for name, _ in named],
            "dtype_names": ["bfloat16"] * len(named),
            "shapes": [list(parameter.shape) for _, parameter in named],
        }

    def _join(self, endpoint: str) -> None:
        from bench.gpu_engine import Agent
        from bench.gpu_strategies import WAIT_S

        bench = self._bench
        ranks = self._config.tensor_parallel_size
        bench.agent = Agent(bench.client, endpoint, ranks, patched=self._config.patched)
        bench.trainer.ask("join")
        if self._wants_native():
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            packed = not any(cell.strategy == "vllm-per-tensor" for cell in self._config.cells)
            bench.trainer.ask("native_init", port=port, packed=packed)  # began
            call = ("init_weight_transfer_engine", worker_info(port, ranks, packed=packed))
            joining = threading.Thread(target=bench.client.rpc, args=call, daemon=True)
            joining.start()
            bench.trainer.answer()  # an error is raised at once, while the ranks would wait for minutes
            joining.join(WAIT_S)

    def quiet(self, batch: int, churn: bool) -> tuple[float, Timeline]:
        """A round without updates: when its measured part began, and its arrivals. Once for each kind of load."""
        if (batch, churn) not in self._quiet:
            client = self._bench.client
            client.timeline = timeline = Timeline()
            client.start(batch, resubmit=churn)
            time.sleep(self._config.settle_s)
            started = time.perf_counter()
            time.sleep(self._config.round_s)
            client.stop()
            self._quiet[batch, churn] = started, timeline
        return self._quiet[batch, churn]

    def cell(self, cell: DictConfig) -> dict[str, Any]:
        """One strategy at one batch size."""
        back_to_back = cell.interval_s == 0
        seconds = self._config.round_s if back_to_back else min(self._config.round_s, cell.updates * cell.interval_s)
        began, quiet = self.quiet(cell.batch, cell.get("churn", False))
        client = self._bench.client
        client.timeline = Timeline()
        client.watch(bool(cell.get("watch")))
        memory_seen: list[dict[str, Any]] = []
        _, _, way = cell.strategy.partition("inflight-")
        client.swap_by(way or None)
        self._trace = Trace() if self._config.trace else None
        updates: list[Update] = []
        kept: list[float] = []
        while len(updates) < cell.updates:
            fitting = cell.updates if back_to_back else int(seconds / cell.interval_s + 0.5)
            count = max(1, min(cell.updates - len(updates), fitting))
            rate, length = self._round(cell, count, updates, memory_seen)
            # Against the same part of the quiet round: steps get slower as the sequences grow.
            kept.append(rate / quiet.rate(began, began + min(length, self._config.round_s)))
        for update, (waited, *parts) in zip(updates, client.take_swaps(), strict=False):
            update.waited_s = waited
            update.remap_s = sum(parts)
            update.remap_parts_s = tuple(parts)
        self.timelines[f"{cell.strategy} x{cell.batch} every {cell.interval_s:g} s"] = (client.timeline, updates)
        result = summarize(cell.strategy, client.timeline, updates, quiet.rate(began, began + seconds))
        share = round(sum(kept) / len(kept), 4)
        result |= {"batch": cell.batch, "interval_s": cell.interval_s, "throughput_kept": share}
        if cell.strategy.startswith("inflight"):
            swaps = self._bench.trainer.ask("swaps")["swaps"][-len(updates) :]
            result["phases_ms"] = phases([update.packed_s for update in updates], swaps)
        watched = {"tags": client.tags.summary(), "memory": memory_seen} if client.tags else {}
        if self._trace is not None:
            watched["late"] = late(client.timeline, updates, self._trace)
            print(show(watched["late"]))
        return result | watched

    def _round(
        self, cell: DictConfig, count: int, updates: list[Update], memory_seen: list[dict[str, Any]]
    ) -> tuple[float, float]:
        """Updates on fresh sequences; tokens a second from the first update on, and over how many seconds."""
        from bench.gpu_strategies import STRATEGIES

        client = self._bench.client
        if self._trace is not None:
            client.rpc("take_trace")  # begins
        client.start(cell.batch, resubmit=cell.strategy in ("abort", "drain") or cell.get("churn", False))
        time.sleep(self._config.settle_s)
        started = time.perf_counter()
        for i in range(count):
            time.sleep(max(0.0, started + i * cell.interval_s - time.perf_counter()))
            self._version += 1
            if cell.get("watch") and len(updates) % cell.watch == 0:
                memory_seen.append(memory(len(updates)))
            updates.append(STRATEGIES[cell.strategy](self._bench, self._version))
        time.sleep(max(0.0, started + count * cell.interval_s - time.perf_counter()))
        ended = time.perf_counter()
        if cell.get("watch"):
            memory_seen.append(memory(len(updates)))
        rate = client.timeline.rate(started, ended)
        client.stop()
        if self._trace is not None:
            self._trace.add(client.rpc("take_trace"))
        return rate, ended - started

    def close(self) -> None:
        """Ends both processes."""
        if self._bench.agent is not None:
            self._bench.agent.close()
        self._bench.trainer.close()
        self._bench.client.core.shutdown()


def machine(config: DictConfig) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import vllm

    card = "CPU"
    if config.device == "cuda":
        import subprocess

        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "card": card,
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


@hydra.main(version_base=None, config_path="configs", config_name="interruption")
def main(config: DictConfig) -> None:
    """Runs the cells and writes the report after each."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(config)
    report: dict[str, Any] = {
        "machine": machine(config),
        "config": OmegaConf.to_container(config, resolve=True),
        "cells": [],
    }
    try:
        for cell in config.cells:
            try:
                result = run.cell(cell)
            except (RuntimeError, TimeoutError) as error:
                result = {"strategy": cell.strategy, "batch": cell.batch, "error": str(error)}
            report["cells"].append(result)
            shown = {key: value for key, value in result.items() if "raw" not in key}
            print(json.dumps(shown), flush=True)
            write_report(report, run.timelines, out)
            if "error" in result:
                raise SystemExit(f"{cell.strategy}: {result['error']}")
    finally:
        run.close()


if __name__ == "__main__":
    main()
