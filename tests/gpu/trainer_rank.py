"""Rank 0 of a trainer without a run around it: steps on made-up batches, packs after each, prints the figures as JSON.

    python -m tests.gpu.trainer_rank RUN_DIR     # beside `python -m inflight.trainer --run-dir RUN_DIR --rank 1`, …

Leaves start.safetensors and end.safetensors in the run folder: the bytes of the send buffer, and the whole weights.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file

from inflight.config import RunConfig, load
from inflight.trainer.batch import Batch
from inflight.trainer.checkpoint.snapshot import model_tensors, optimizer_tensors
from inflight.trainer.learner import Learner
from inflight.trainer.policy import load_policy
from inflight.trainer.sharding import CoordinatedSource, assembled
from inflight.weights.pack import Packer
from inflight.weights.plan import plan
from inflight.weights.publish.read_fence import ReadFence

SEQUENCES, LENGTH, PROMPT = 16, 96, 16


def made_up(seed: int, vocabulary: int) -> Batch:
    """Random tokens, a tenth of them masked by the gate."""
    generator = torch.Generator().manual_seed(seed)
    shape = (SEQUENCES, LENGTH)
    drawn = (torch.arange(LENGTH) >= PROMPT).expand(shape).contiguous()
    trained = drawn & (torch.rand(shape, generator=generator) > 0.1)
    return Batch(
        input_ids=torch.randint(0, vocabulary, shape, generator=generator),
        completion_mask=drawn,
        trained_mask=trained,
        behaviour_logprobs=-torch.rand(shape, generator=generator) * drawn,
        versions=torch.zeros(shape, dtype=torch.int64),
        lags=torch.zeros(shape, dtype=torch.int64),
        advantages=torch.randn(shape, generator=generator) * drawn,
        scales=torch.full((SEQUENCES,), 1 / int(trained.sum())),
    )


def main(run_dir: str) -> None:
    """See above."""
    config = load(run_dir)
    torch.set_num_threads(config.trainer.threads)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with assembled(config, accelerator.device) as team:
        set_seed(config.seed)
        settings = config.trainer
        policy = load_policy(
            Path(config.model.name),
            bfloat16=settings.autocast,
            device=accelerator.device,
            sharded=settings.processes > 1,
        )
        learner = Learner(policy, config, accelerator, None, team)
        source = CoordinatedSource(policy.master, config.model.dtype, team)
        print(json.dumps(train(config, learner, source)), flush=True)


def train(config: RunConfig, learner: Learner, source: CoordinatedSource) -> dict[str, list[float]]:
    """All steps: loss, norm and the seconds of each step and of each publication's parts."""
    manifest = plan(source.metas, source.tied, 64 << 20, "none")
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8, device=source.device)
    fence, packer = ReadFence(source.device), Packer(manifest, buffer)
    fence.hold(learner.optimizer.optimizer)
    found: dict[str, list[float]] = {name: [] for name in ("loss", "norm", "step_s", "pack_s", "packed_s", "guard_s")}
    vocabulary = learner.policy.master.config.vocab_size
    keep(config, "start", buffer, fence, packer, source)
    for step in range(config.trainer.steps):
        started = time.perf_counter()
        loss, _ = learner.backward(made_up(step, vocabulary), lambda: False)
        norm = learner.step()
        wait(source.device)
        trained = time.perf_counter()
        with fence.reading():
            packer.pack(source)
        queued = time.perf_counter()
        if step % 2:  # else the next step begins while this is packed
            fence.wait_read()
        packed = time.perf_counter()
        values = (loss, norm, trained - started, queued - trained, packed - trained, fence.take_waited_s())
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
    keep(config, "end", buffer, fence, packer, source)
    with learner.coordinator.together("checkpoint"):
        whole = model_tensors(learner.policy.master)
        optimizer_tensors(learner.policy.master, learner.optimizer)
    save_file({name: whole[name].contiguous() for name, _ in source}, Path(config.run_dir) / "whole.safetensors")
    return found


def keep(config: RunConfig, name: str, buffer: torch.Tensor, fence: ReadFence, *parts: Any) -> None:
    """Packs, and writes what is in the send buffer."""
    packer, source = parts
    with fence.reading():
        packer.pack(source)
    fence.wait_read()
    save_file({"buffer": buffer.cpu()}, Path(config.run_dir) / f"{name}.safetensors")


def wait(device: torch.device) -> None:
    """For the device, so that times are those of what was done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1])
