"""Parameters that are sharded over the trainer's ranks, made whole many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

BUCKET_BYTES = 128 << 20
"""Bytes of whole parameters gathered at once: far beyond what a collective costs by itself, and it bounds the memory
that is needed besides the shards, to three times as much."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
_ALIGNMENT = 16
"""Bytes; a view of an element type needs that its bytes begin at a multiple of its size."""


def whole(tensors: Iterable[tuple[torch.Tensor, torch.dtype]]) -> Iterator[torch.Tensor]:
    """Each tensor whole, in order. Those that are sharded come in the dtype asked for, the others as they are.

    What FSDP2 shards (by rows, over one dimension of ranks) is cast and gathered in buckets; any other DTensor by its
    own `full_tensor`. Both are collectives, so all ranks must iterate over the same tensors, to the end.
    """
    bucket: list[tuple[torch.Tensor, torch.dtype]] = []
    size = 0
    for tensor, dtype in tensors:
        if not by_rows(tensor):
            yield from _gather(bucket)
            bucket, size = [], 0
            yield tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
            continue
        bucket.append((tensor, dtype))
        size += tensor.numel() * dtype.itemsize
        if size >= BUCKET_BYTES:
            yield from _gather(bucket)
            bucket, size = [], 0
    yield from _gather(bucket)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    return hasattr(tensor, "full_tensor")


def sharded_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor of the parameter's shape, sharded and placed as the parameter is; others are placed only.

    Every rank takes its own part of what it holds: nothing travels.
    """
    placed = tensor.to(parameter.device)
    if not is_sharded(parameter) or tensor.shape != parameter.shape:
        return placed
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def by_rows(tensor: torch.Tensor) -> bool:
    """Whether each rank holds the next ceil(rows / ranks) rows, as FSDP2 does it."""
    from torch.distributed.tensor import DTensor, Shard

    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),)


def _gather(bucket: list[tuple[torch.Tensor, torch.dtype]]) -> Iterator[torch.Tensor]:
    """One all-gather of bytes: a rank's parts lie one behind the other, each padded to as many rows as the first's."""
    if not bucket:
        return
    mesh = bucket[0][0].device_mesh  # type: ignore[attr-defined]
    offsets = [0]
    for tensor, dtype in bucket:
        rows = math.ceil(tensor.shape[0] / mesh.size())
        part = rows * math.prod(tensor.shape[1:]) * dtype.itemsize
        offsets.append(offsets[-1] + math.ceil(part / _ALIGNMENT) * _ALIGNMENT)
    own = torch.empty(offsets[-1], dtype=torch.uint8, device=bucket[0][0].device)
    for (tensor, dtype), offset in zip(bucket, offsets, strict=False):
        local = tensor.to_local().to(dtype).reshape(-1).view(torch.uint8)  # type: ignore[attr-defined]
        own[offset : offset + local.numel()].copy_(local)
    parts = torch.empty(mesh.size(), offsets[-1], dtype=torch.uint8, device=own.device)
    _all_gather(parts.view(-1), own, group=mesh.get_group())
    for (tensor, dtype), offset in zip(bucket, offsets, strict=False):
        rows = math.ceil(tensor.shape[0] / mesh.size())
        nbytes = rows * math.prod(tensor.shape[1:]) * dtype.itemsize
        joined = parts[:, offset : offset + nbytes].reshape(-1)  # only the last rows can be padding
        yield joined[: tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape)
