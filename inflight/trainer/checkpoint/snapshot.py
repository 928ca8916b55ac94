"""What a checkpoint is made of, copied to the host: training continues while it is written."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from inflight.trainer.checkpoint import rng
from inflight.weights.shards import is_sharded


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Tensors on the CPU that nothing else refers to."""

    weights: dict[str, torch.Tensor]
    """The state dict, float32; names that are tied have one tensor."""
    moments: dict[str, torch.Tensor]
    """`<parameter>.<state>` of the optimizer."""
    random: dict[str, torch.Tensor]
    """See rng.py."""


def take(
    model: nn.Module, optimizer: torch.optim.Optimizer, together: AbstractContextManager[None] | None = None
) -> Snapshot:
    """A snapshot of this moment; what is sharded is gathered inside `together`, where the other ranks do the same."""
    with together or nullcontext():
        return Snapshot(model_tensors(model), optimizer_tensors(model, optimizer), rng.capture())


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, whole. Of a sharded model by a collective that all ranks take part in, for rank 0 alone: on its
    CPU; the others get empty tensors."""
    kept = model.state_dict(keep_vars=True)
    found = {id(tensor): _whole(tensor) for tensor in {id(each): each for each in kept.values()}.values()}
    return {name: found[id(tensor)] for name, tensor in kept.items()}  # tied parameters stay one tensor


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`<parameter>.<state>` → tensor, whole; see model_tensors."""
    return {
        f"{name}.{key}": _whole(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if not is_sharded(plain):
        return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)
    gathered: torch.Tensor = plain.full_tensor()  # type: ignore[attr-defined]
    return gathered.cpu().contiguous() if dist.get_rank() == 0 else gathered.new_empty(0)
