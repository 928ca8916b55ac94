"""A LoRA adapter as the policy: float32 matrices that are trained, and a frozen model with an adapter that computes.

What computes is transformers' model with PEFT's layers in it, in the dtype of the base. Its matrices take the values
that generators get: A and B are rounded to that dtype, then B is scaled. So PEFT's own factor is 1, and the gradient of
the trained B is scaled instead.

Over several ranks the base is sharded with FSDP2, which gathers a block while it computes. The adapter is small, so
each rank holds all of it with its optimizer state: the ranks' gradients are averaged, and all take the same step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from inflight.base_digest import BASE_DIGEST, base_digest, require_base
from inflight.config import RunConfig
from inflight.config.lora import LoraConfig
from inflight.models.weight_files import ADAPTER, ADAPTER_WEIGHTS
from inflight.peft_layers import adapter_off, matrices_of, with_adapter
from inflight.trainer.apart import require_apart
from inflight.trainer.loading import load_model
from inflight.trainer.logprobs import Scores
from inflight.trainer.policy import Policy, Scorer, frozen_options
from inflight.trainer.sharding import shard
from inflight.trainer.shards import to_shard


class Adapter(nn.Module):
    """The trained matrices, float32, named as in a PEFT checkpoint: `….q_proj.lora_A.weight` [rank, in] and
    `….q_proj.lora_B.weight` [out, rank]."""

    def __init__(
        self, base: PreTrainedModel, settings: LoraConfig, matrices: dict[str, torch.Tensor], digest: str
    ) -> None:
        """`digest` is that of the base's weights; a checkpoint names it."""
        super().__init__()
        self.base = digest
        self.config = base.config
        self.generation_config = GenerationConfig()
        self.scaling = settings.scaling
        self._settings = settings
        for name, values in matrices.items():
            place: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = cast(nn.Module, place._modules[part])
            place.register_parameter(leaf, nn.Parameter(values.detach().float().clone()))

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor], max_shard_size: int = 0) -> None:
        """A PEFT directory, whose weights are one file: any PEFT loads it onto the base. Raises OSError or
        SafetensorError."""
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state_dict.items()}
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", BASE_DIGEST: self.base})
        settings = self._settings
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "bias": "none",
            "inference_mode": True,
            "base_model_name_or_path": str(self.config.name_or_path),
            "r": settings.rank,
            "lora_alpha": settings.alpha or settings.rank,
            "use_rslora": settings.rslora,
            "target_modules": sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}),
        }
        (folder / ADAPTER).write_text(json.dumps(described, indent=1) + "\n")


class AdapterPolicy(Policy):
    """See the module's text. `master` is the Adapter; `compute` the model with PEFT's layers."""

    def __init__(self, adapter: Adapter, compute: PreTrainedModel, *, sharded: bool = False) -> None:
        """`sharded`: over the ranks of the process group, which then collect gradients together."""
        self.master = cast(PreTrainedModel, adapter)
        self.compute = compute
        self.scorer = Scorer(compute)
        self._scaling = adapter.scaling
        self._sharded = sharded
        twins = dict(matrices_of(compute))
        self._pairs = [(master, twins[name]) for name, master in adapter.named_parameters()]
        self._scaled = {id(twin) for name, twin in twins.items() if ".lora_B." in name}
        self.refresh()

    def score_base(self, *inputs: Any, **settings: Any) -> Scores:
        """As `score`, of the base: with the adapter off."""
        with adapter_off(self.compute):
            return self.score(*inputs, **settings)

    def collect_gradients(self) -> None:
        gradients = [twin.grad for _, twin in self._pairs]
        if self._sharded:
            gradients = _averaged([twin for _, twin in self._pairs])
        for (master, twin), gradient in zip(self._pairs, gradients, strict=True):
            twin.grad = None
            if gradient is None:
                continue
            scaled = gradient.float() * (self._scaling if id(twin) in self._scaled else 1.0)
            master.grad = scaled if master.grad is None else master.grad.add_(scaled)

    @torch.no_grad()
    def refresh(self) -> None:
        super().refresh()
        for _, twin in self._pairs:
            if id(twin) in self._scaled:
                twin.mul_(self._scaling)


def _averaged(matrices: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """The means over all ranks of the gradients of matrices, in float32; a rank without one counts as zero. All ranks
    call this."""
    own = [torch.zeros_like(each) if each.grad is None else each.grad for each in matrices]
    joined = torch.cat([gradient.reshape(-1).float() for gradient in own])
    dist.all_reduce(joined)
    joined /= dist.get_world_size()
    parts = joined.split([each.numel() for each in matrices])
    return [part.view(each.shape) for each, part in zip(matrices, parts, strict=True)]


def adapter_policy(config: RunConfig, directory: Path, device: torch.device) -> AdapterPolicy:
    """The policy of a run that trains an adapter of the model in `directory`: a new one, whose B is zero, or that of
    the checkpoint which the run resumes from. Over several ranks all of them call this.

    Raises ConfigError when PEFT is not installed, or a module can't have an adapter that generators swap; ValueError
    for a checkpoint of another base; OSError or ValueError as `load_model` does.
    """
    settings = config.trainer.lora
    sharded = config.trainer.processes > 1
    dtype, place = frozen_options(config, device)
    # Rank 0 publishes and saves. The ranks read the same files.
    digest = base_digest(directory) if not sharded or dist.get_rank() == 0 else ""
    fill: Callable[[nn.Module], None] | None = None
    if sharded:
        base, fill = to_shard(directory, dtype, **place)
    else:
        base = load_model(directory, dtype, device, **place)
    with_adapter(base, settings.rank, settings.target_modules, device)
    twins = dict(matrices_of(base))
    matrices = _new({name: tuple(twin.shape) for name, twin in twins.items()}, config.seed)
    if config.checkpoint:
        path = Path(config.checkpoint) / ADAPTER_WEIGHTS
        matrices = _read(path, matrices)
        if digest:
            require_base(path, digest, directory)
    policy = AdapterPolicy(Adapter(base, settings, matrices, digest).to(device), base, sharded=sharded)
    if fill is not None:
        shard(policy.scorer, base, fill, bfloat16=False, device=device, whole=twins.values())
    if config.trainer.packing:
        require_apart(policy.score, device, type(base).__name__)
        policy.reshard()
    return policy


def _new(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """The matrices of a new adapter, float32 on the CPU: A uniform within 1 / sqrt(in) as PEFT's, B zero.

    They depend on names, shapes and seed alone, so that each rank makes the same."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.zeros(shape)
        if ".lora_B." in name
        else torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=source)
        for name, shape in shapes.items()
    }


def _read(path: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of a checkpoint. Raises ValueError when they are not those of the configured adapter."""
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    if wrong := sorted(
        {name for name, tensor in found.items() if shapes.get(name) != tuple(tensor.shape)} | (shapes.keys() - found)
    ):
        raise ValueError(f"{path} holds another adapter than trainer.lora describes: {wrong[0]}")
    return {name: found[name] for name in expected}  # in the order of the model
