"""Greedy tokens after swaps must be those of a fresh engine with the same weights, with graphs and async scheduling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_shapes import random_model
from tests.gpu.engine_process import PREFIX

pytestmark = pytest.mark.gpu

ENGINE = {"max_model_len": 1024, "max_num_seqs": 64, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}


def run(spec: dict[str, Any], timeout_s: float = 400) -> list[Any]:
    """The results of the actions; fails with the process's log when one failed."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.gpu.engine_process", json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **spec.get("env", {})},
    )
    results = [json.loads(line[len(PREFIX) :]) for line in process.stdout.splitlines() if line.startswith(PREFIX)]
    errors = [result["error"] for result in results if "error" in result]
    log = (process.stdout + process.stderr)[-6000:]
    assert len(results) == len(spec["actions"]), log
    assert not errors, f"{errors}\n{log}"
    return [result["result"] for result in results]


def save(folder: Path, shape: str, seed: int, *, tied: bool) -> tuple[str, str]:
    """A checkpoint of random weights; returns its folder and its safetensors file."""
    model = random_model(shape, "cuda", seed, tied=tied)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return str(folder), str(folder / "model.safetensors")


EAGER = {"enforce_eager": True}
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("tied", "swap", "options", "env"),
    [
        pytest.param(False, "remap", {}, {}, id="untied"),
        pytest.param(True, "remap", {}, {}, id="tied"),
        pytest.param(False, "graphs", {}, {}, id="graphs"),
        pytest.param(True, "graphs", {}, {}, id="graphs-tied"),
        pytest.param(False, "graphs", {"tensor_parallel_size": 2}, {}, id="graphs-tp2"),
        pytest.param(False, "graphs", {"tensor_parallel_size": 4}, {}, id="graphs-tp4"),
        pytest.param(False, "graphs", {"pipeline_parallel_size": 2}, {}, id="graphs-pp2"),
        pytest.param(False, "graphs", {}, V1_RUNNER, id="graphs-v1"),
        pytest.param(False, "graphs", EAGER, {}, id="graphs-eager"),
        pytest.param(False, "copy", EAGER, {}, id="copy"),
        pytest.param(False, "host", EAGER, {}, id="host"),
        pytest.param(False, "remap", {"tensor_parallel_size": 2}, {}, id="tp2"),
        # Twice as many ranks as KV heads: each head lies on two of them.
        pytest.param(False, "remap", {"tensor_parallel_size": 4}, {}, id="tp4"),
        pytest.param(False, "remap", {"pipeline_parallel_size": 2}, {}, id="pp2"),
        pytest.param(False, "remap", {}, V1_RUNNER, id="v1"),
    ],
)
def test_swapped_engine_equals_fresh_ones(
    tmp_path: Path, tied: bool, swap: str, options: dict[str, Any], env: dict[str, str]
) -> None:
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    folder_a, file_a = save(tmp_path / "a", "tiny", 1, tied=tied)
    folder_b, file_b = save(tmp_path / "b", "tiny", 2, tied=tied)
    fresh = {"swap": swap, "engine": {**ENGINE, **options}, "env": env, "actions": [{"do": "generate"}]}
    (b,) = run({**fresh, "model": folder_b})
    actions = [{"do": "generate"}]
    for version, file in enumerate([file_b, file_a, file_b], start=1):
        actions += [{"do": "stage", "path": file, "version": version}]  # type: ignore[dict-item]
        actions += [{"do": "commit", "version": version}, {"do": "generate"}]  # type: ignore[dict-item]
    results = run({**fresh, "model": folder_a, "actions": actions})
    tokens = [result for action, result in zip(actions, results, strict=True) if action["do"] == "generate"]
    a = tokens[0]
    assert a != b
    assert tokens == [a, b, a, b]


@pytest.mark.parametrize("swap", ["remap", "graphs"])
def test_many_swaps_between_equal_sets_change_nothing(tmp_path: Path, swap: str) -> None:
    folder, _ = save(tmp_path / "a", "tiny", 1, tied=False)
    storm = {"do": "storm", "batch": 32, "tokens": 200}
    actions: list[dict[str, Any]] = [storm, {**storm, "every": 2}]
    for version, way in ((5000, "calls"), (10000, "copy")) if swap == "remap" else ((10000, "copy"), (15000, "graphs")):
        actions += [{"do": "swap_by", "way": way}, {**storm, "every": 2, "version": version}]
    results = run({"model": folder, "swap": swap, "engine": ENGINE, "actions": actions})
    quiet, *swapped = [result["tokens"] for result in results if result is not None]
    assert all(tokens == quiet for tokens in swapped)
