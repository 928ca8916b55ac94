"""Greedy tokens after swaps of an adapter must be those of a fresh engine that loads it from disk, with CUDA graphs and
without, beside requests of the base."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_shapes import save_adapter, write_config
from tests.gpu.test_identity import EAGER, ENGINE, V1_RUNNER, run

pytestmark = pytest.mark.gpu

WORKER = "inflight.generator.worker.adapter_cuda.InflightCUDAAdapterWorker"
STOCK = "vllm.v1.worker.gpu_worker.Worker"
POLICY = 1 << 20
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "load_format": "dummy"}


@pytest.mark.parametrize(
    ("options", "env"),
    [
        pytest.param({}, {}, id="graphs"),
        pytest.param(EAGER, {}, id="eager"),
        pytest.param({}, V1_RUNNER, id="graphs-v1"),
        pytest.param({"tensor_parallel_size": 2}, {}, id="graphs-tp2"),
    ],
)
def test_swapped_adapters_equal_fresh_engines(tmp_path: Path, options: dict[str, Any], env: dict[str, str]) -> None:
    if torch.cuda.device_count() < (ranks := options.get("tensor_parallel_size", 1)):
        pytest.skip(f"needs {ranks} GPUs")
    model = str(write_config("tiny", tmp_path / "model"))
    # Of two ranks: what the larger one has left in a slot must not be seen under the smaller.
    folders = {
        name: save_adapter("tiny", rank, tmp_path / name, "cpu", seed)
        for seed, (name, rank) in enumerate((("a", 16), ("b", 8)), start=1)
    }
    common: dict[str, Any] = {"model": model, "engine": {**ENGINE, **LORA, **options}, "env": env}
    fresh = [
        {"do": do, "lora": [number, str(folder)]}
        for number, folder in enumerate(folders.values(), 1)
        for do in ("generate", "generate_mixed")
    ]
    a, mixed_a, b, mixed_b, base = run({**common, "worker": STOCK, "actions": [*fresh, {"do": "generate"}]})
    policy = [POLICY, "inflight://policy"]
    actions: list[dict[str, Any]] = [{"do": "generate", "lora": policy}]
    for version, name in enumerate("abab", start=1):
        actions += [
            {"do": "stage", "path": str(folders[name] / "sent.safetensors"), "version": version, "adapter": POLICY},
            {"do": "commit", "version": version, "adapter": POLICY},
            {"do": "generate", "lora": policy},
            {"do": "generate"},
            {"do": "generate_mixed", "lora": policy},
        ]
    results = run({**common, "worker": WORKER, "adapters": ["policy"], "actions": actions})
    made = [result for action, result in zip(actions, results, strict=True) if "generate" in action["do"]]
    assert made[0] == base, "before its first version it changes nothing"
    assert a != b
    assert made[1::3] == [a, b, a, b]
    assert made[2::3] == [base] * 4
    assert made[3::3] == [mixed_a, mixed_b] * 2, "requests of the base and of the adapter in one batch"


def test_the_bench_of_adapters_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.adapters", "--shape", "tiny", "--updates", "20", "--own-updates", "5"]
    run = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert '"aborted": 0' in run.stdout
