"""The trainer alone at a real size: peak device memory and tokens a second, on made-up batches and random weights.

    python -m bench.trainer_memory --ranks 2                     # 7B shape, FSDP2 over two GPUs, sequences of 8,192
    python -m bench.trainer_memory --ranks 2 --sequence 32768
    python -m bench.trainer_memory --ranks 1                     # one GPU: float32 master and bfloat16 twin, 16 layers
    python -m bench.trainer_memory --shape tiny --sequence 64    # anywhere, for trying it out

What is run is the trainer's own: Learner.learn for each micro-batch and Learner.step, in bfloat16 on float32 master
weights with AdamW, the objective tis. Not part of it: the send buffer (2 bytes a parameter on the first GPU),
checkpoints, collating. One rank needs 20 bytes a parameter for weights, twin, gradients and moments, 152 GB for all 28
layers of the 7B shape: `--layers` (16 unless said otherwise) makes it fit one GPU. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.gpu_shapes import SHAPES, config_of
from inflight.config import ModelConfig, RolloutConfig, RunConfig, TaskConfig, TrainerConfig
from inflight.trainer.batch import Batch
from inflight.trainer.learner import Learner
from inflight.trainer.loading import attention_for, ready
from inflight.trainer.policy import Policy
from inflight.trainer.recompute import recompute_layers
from inflight.trainer.sharding import form_group, shard

PROMPT = 32
"""Tokens of each sequence that are not trained on."""
GROUP_TIMEOUT_S = 60.0
LAYERS_OF_ONE_RANK = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks, each a process with a GPU of its own; one rank in this process."""
    options = _parser().parse_args(argv)
    if options.ranks == 1:
        run(options)
        return 0
    if options.rank is not None:
        run(options)
        dist.destroy_process_group()
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_started([*given, "--store", str(Path(folder) / "store")], rank) for rank in range(options.ranks)]
        try:
            codes = [rank.wait(options.timeout_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(10)
    return max(map(abs, codes))


def _started(argv: Sequence[str], rank: int) -> subprocess.Popen[bytes]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = visible[rank] if rank < len(visible) and visible[rank] else str(rank)
    command = [sys.executable, "-m", "bench.trainer_memory", *argv, "--rank", str(rank)]
    return subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": device})


def run(options: argparse.Namespace) -> None:
    """One rank, from random weights to the figures, which rank 0 prints."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = accelerator.device
    if options.ranks > 1:
        store = dist.FileStore(options.store, options.ranks)
        form_group(store, options.rank, options.ranks, device, GROUP_TIMEOUT_S)
    policy = made_policy(options, device)
    if options.checkpointing:
        recompute_layers(policy.compute)
    learner = Learner(policy, _config(options), accelerator)
    rank = options.rank or 0
    batches = [made_batch(options, seed=rank * options.micro_batches + at) for at in range(options.micro_batches)]
    losses = []
    seconds = []
    for _ in range(1 + options.steps):  # the first chooses kernels and makes the optimizer's state
        _wait(device)
        began = time.perf_counter()
        losses.append(sum(learner.learn(batch)[0] for batch in batches))
        learner.step()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    found = _largest(torch.tensor([_peak_gib(device), min(seconds[1:])], dtype=torch.float64, device=device))
    if rank == 0:
        tokens = options.ranks * options.micro_batches * options.sequences * options.sequence
        print(json.dumps(_line(options, policy, device, losses, tokens, *found)), flush=True)


def _line(
    options: argparse.Namespace,
    policy: Policy,
    device: torch.device,
    losses: list[float],
    tokens: int,
    peak_gib: float,
    seconds: float,
) -> dict[str, Any]:
    named = ("shape", "ranks", "sequence", "sequences", "micro_batches", "packing", "checkpointing", "top_p")
    return {name: getattr(options, name) for name in named} | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "layers": _layers(options),
        "parameters": sum(each.numel() for each in policy.master.parameters()),
        "attention": policy.compute.config._attn_implementation,
        "peak_gib_of_the_fullest_rank": round(peak_gib, 2) if device.type == "cuda" else None,
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "loss": losses[-1],
    }


def made_policy(options: argparse.Namespace, device: torch.device) -> Policy:
    """Random weights, made on the device block by block, as a run has them on this rank."""
    attention = attention_for(device, torch.bfloat16, packing=options.packing)
    master = _blank(options, torch.float32, attention)
    if options.ranks > 1:
        policy = Policy(master)
        shard(policy.scorer, master, lambda module: _randomize(module, device), bfloat16=True, device=device)
        return policy
    twin = _blank(options, torch.bfloat16, attention)
    for model in (master, twin):
        _randomize(model, device)
    return Policy(master, twin)


def _blank(options: argparse.Namespace, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    config = config_of(options.shape, positions=max(32768, options.sequence))
    config.num_hidden_layers = _layers(options)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return ready(model)


def _layers(options: argparse.Namespace) -> int:
    whole = int(SHAPES[options.shape]["num_hidden_layers"])
    return options.layers or (min(whole, LAYERS_OF_ONE_RANK) if options.ranks == 1 else whole)


def _randomize(root: nn.Module, device: torch.device) -> None:
    """Values for all parameters that have none: norms 1, others normal with deviation 0.02; buffers are moved."""
    noise = torch.Generator(device).manual_seed(0)
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                values = values.normal_(0.0, 0.02, generator=noise) if values.ndim > 1 else values.fill_(1.0)
                setattr(module, name, nn.Parameter(values))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def made_batch(options: argparse.Namespace, seed: int) -> Batch:
    """Random tokens, all behind the prompt sampled and trained on."""
    noise = torch.Generator().manual_seed(seed)
    shape = (options.sequences, options.sequence)
    drawn = (torch.arange(options.sequence) >= PROMPT).expand(shape).contiguous()
    versions = torch.zeros(shape, dtype=torch.int64)
    return Batch(
        input_ids=torch.randint(0, SHAPES[options.shape]["vocab_size"], shape, generator=noise),
        completion_mask=drawn,
        trained_mask=drawn.clone(),
        behaviour_logprobs=-10 * torch.rand(shape, generator=noise) * drawn,
        versions=versions,
        lags=versions,
        advantages=torch.randn(shape, generator=noise) * drawn,
        scales=torch.full((len(drawn),), 1 / (options.ranks * options.micro_batches * int(drawn.sum()))),
    )


def _config(options: argparse.Namespace) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name="tiny"),
        task=TaskConfig(name="countdown"),
        run_dir="bench",
        rollout=RolloutConfig(top_p=options.top_p),
        trainer=TrainerConfig(
            processes=options.ranks, packing=options.packing, gradient_checkpointing=options.checkpointing
        ),
    )


def _largest(values: torch.Tensor) -> list[float]:
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(each) for each in values.tolist()]


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.trainer_memory", description=__doc__)
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all, but 16 at most with one rank")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="of each rank in a step")
    parser.add_argument("--steps", type=int, default=2, help="that are measured, after one that is not")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
