"""A trainer of two ranks against one: the same steps, the same bytes published; and packing beside the trainer's work.

On a machine without GPUs the ranks are CPU processes, so that the harness itself can be tried there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bench.gpu_shapes import random_model
from inflight.config import ModelConfig, RunConfig, TaskConfig, TrainerConfig, save
from inflight.trainer.checkpoint.snapshot import model_tensors
from inflight.trainer.loading import load_model
from inflight.weights.pack import Packer
from inflight.weights.plan import plan
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.source import WeightSource

pytestmark = pytest.mark.gpu
SHAPE = os.environ.get("INFLIGHT_FSDP_SHAPE", "1.5b" if torch.cuda.is_available() else "tiny")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are CUDA's")
@pytest.mark.parametrize("fenced", [True, False])
def test_a_step_right_after_publishing_does_not_change_what_is_packed(fenced: bool) -> None:
    """Without the fence it would: a reading that is late sees the step's values."""
    module = nn.ParameterList([nn.Parameter(torch.full((1 << 22,), 1.0, device="cuda")) for _ in range(4)])
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for parameter in module:
        parameter.grad = torch.ones_like(parameter)
    source = WeightSource(module, "float32")
    manifest = plan(source.metas, source.tied, 64 << 20, "none")
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8, device="cuda")
    fence, packer = ReadFence(source.device), Packer(manifest, buffer)
    optimizer.step()  # the kernels are loaded now
    packer.pack(source)
    fence.hold(optimizer if fenced else torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    torch.cuda.synchronize()
    with fence.reading():
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        packer.pack(source)
    optimizer.step()
    fence.wait_read()
    torch.cuda.synchronize()
    expected: Any = 0.0 if fenced else -1.0  # 1 - 1 after the first step, -1 after the second
    assert buffer.view(torch.float32).eq(expected).all()
    assert module[0].eq(-1.0).all()
    assert (fence.take_waited_s() > 0.01) == fenced


def start(folder: Path, rank: int) -> subprocess.Popen[str]:
    """A rank with a GPU of its own."""
    module = ["tests.gpu.trainer_rank", str(folder)]
    if rank:
        module = ["inflight.trainer", "--run-dir", str(folder), "--rank", str(rank)]
    visible = {"CUDA_VISIBLE_DEVICES": str(rank)} if torch.cuda.is_available() else {}
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **visible},
    )


def train(folder: Path, model: Path, processes: int, *, dtype: str, steps: int = 4) -> dict[str, list[float]]:
    """The figures of rank 0."""
    (folder / "bus").mkdir(parents=True)
    settings = TrainerConfig(
        processes=processes, steps=steps, micro_batch=4, learning_rate=1e-4, autocast=dtype == "bfloat16"
    )
    save(RunConfig(ModelConfig(str(model), dtype), TaskConfig("addition"), str(folder), trainer=settings))
    ranks = [start(folder, rank) for rank in range(processes)]
    try:
        logs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * processes, "\n".join(log[1][-3000:] for log in logs)
    figures: dict[str, list[float]] = json.loads(logs[0][0].strip().splitlines()[-1])
    for name in ("step_s", "pack_s", "packed_s", "guard_s"):
        print(f"{model.name} {dtype} ranks={processes} {name} {[round(1e3 * each, 2) for each in figures[name]]} ms")
    return figures


def saved(folder: Path, shape: str, *, tied: bool) -> Path:
    """A model directory of random weights."""
    model = random_model(shape, "cuda" if torch.cuda.is_available() else "cpu", seed=1, tied=tied)
    model.save_pretrained(folder / shape)
    return folder / shape


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative, over all tensors."""
    assert ours.keys() == theirs.keys()
    square = sum((ours[name].double() - theirs[name].double()).square().sum() for name in ours)
    return float((square / sum(each.double().square().sum() for each in theirs.values())) ** 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_take_the_steps_of_one_and_publish_its_bytes(tmp_path: Path, tied: bool) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    model = saved(tmp_path, "tiny", tied=tied)
    two, one = (train(tmp_path / f"run{count}", model, count, dtype="float32") for count in (2, 1))
    for name in ("loss", "norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-8)
    files = {name: [load_file(tmp_path / f"run{n}/{name}.safetensors") for n in (2, 1)] for name in ("start", "whole")}
    assert torch.equal(*(each["buffer"] for each in files["start"]))
    assert distance(*files["whole"]) <= 1e-5
    check_end(tmp_path / "run2", model, "float32")


def check_end(folder: Path, model: Path, dtype: str) -> None:
    """What was published last is, byte for byte, what one process packs of the same weights."""
    module = load_model(model, torch.float32, torch.device("cpu"), attention="sdpa")
    start = {name: tensor.clone() for name, tensor in model_tensors(module).items()}
    whole = load_file(folder / "whole.safetensors")
    module.load_state_dict(whole, strict=False)
    module.tie_weights()
    source = WeightSource(module, dtype)
    assert distance({name: whole[name] for name in whole}, {name: start[name] for name in whole}) > 1e-4
    manifest = plan(source.metas, source.tied, 64 << 20, "none")
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    Packer(manifest, buffer).pack(source)
    assert torch.equal(load_file(folder / "end.safetensors")["buffer"], buffer)


def test_in_bfloat16_a_larger_model_publishes_its_bytes_and_tells_the_time(tmp_path: Path) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    model = saved(tmp_path, SHAPE, tied=True)
    two, one = (train(tmp_path / f"run{count}", model, count, dtype="bfloat16", steps=6) for count in (2, 1))
    assert two["loss"] == pytest.approx(one["loss"], rel=5e-2, abs=5e-3)
    assert two["norm"] == pytest.approx(one["norm"], rel=5e-2)
    first = [load_file(tmp_path / f"run{n}/start.safetensors")["buffer"] for n in (2, 1)]
    assert torch.equal(*first)
    check_end(tmp_path / "run2", model, "bfloat16")
