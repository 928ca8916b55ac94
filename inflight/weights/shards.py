"""Parameters that are sharded over the trainer's ranks, gathered many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

BUCKET_BYTES = 128 << 20
"""Bytes of full parameters gathered at once: so many that the fixed cost of a collective does not matter, while the
additional memory is bounded, to three times as much."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
_ALIGNMENT = 16
"""Bytes; a view of an element type must begin at a multiple of its size."""


def whole(tensors: Iterable[tuple[torch.Tensor, torch.dtype]]) -> Iterator[torch.Tensor]:
    """Yields each tensor in full, in order. Sharded ones are cast to the requested dtype, the others are unchanged.

    Tensors sharded by FSDP2 (by rows, over one dimension of ranks) are cast and gathered in buckets; any other DTensor
    by its own `full_tensor`. Both are collectives, so all ranks must iterate over the same tensors, to the end.
    """
    bucket: list[tuple[torch.Tensor, torch.dtype]] = []
    size = 0
    for tensor, dtype in tensors:
        if not by_rows(tensor):
            yield from _gather(bucket)
            bucket = []
            size = 0
            yield tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
            continue
        bucket.append((tensor, dtype))
        size += tensor.numel() * dtype.itemsize
        if size >= BUCKET_BYTES:
            yield from _gather(bucket)
            bucket = []
            size = 0
    yield from _gather(bucket)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds only a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def sharded_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Shards and places a full tensor like the parameter of the same shape; places it only if that is not sharded.

    Every rank takes its part of its own copy: nothing is sent.
    """
    placed = tensor.to(parameter.device)
    if not is_sharded(parameter) or tensor.shape != parameter.shape:
        return placed
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    placements = parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def by_rows(tensor: torch.Tensor) -> bool:
    """Whether each rank holds the next ceil(rows / ranks) rows, as with FSDP2."""
    if not is_sharded(tensor):  # nearly all are not, and the import takes longer than this
        return False
    from torch.distributed.tensor import DTensor, Shard

    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),)


def _gather(bucket: list[tuple[torch.Tensor, torch.dtype]]) -> Iterator[torch.Tensor]:
    """One all-gather of bytes: a rank's parts lie one after the other, each padded to as many rows as rank 0's."""
    if not bucket:
        return
    mesh = bucket[0][0].device_mesh  # type: ignore[attr-defined]
    offsets = [0]
    for tensor, dtype in bucket:
        offsets.append(offsets[-1] + math.ceil(_part_bytes(tensor, dtype, mesh.size()) / _ALIGNMENT) * _ALIGNMENT)
    own = torch.empty(offsets[-1], dtype=torch.uint8, device=bucket[0][0].device)
    for (tensor, dtype), offset in zip(bucket, offsets, strict=False):
        local = tensor.to_local().to(dtype).reshape(-1).view(torch.uint8)  # type: ignore[attr-defined]
        own[offset : offset + local.numel()].copy_(local)
    parts = torch.empty(mesh.size(), offsets[-1], dtype=torch.uint8, device=own.device)
    _all_gather(parts.view(-1), own, group=mesh.get_group())
    for (tensor, dtype), offset in zip(bucket, offsets, strict=False):
        nbytes = _part_bytes(tensor, dtype, mesh.size())
        joined = parts[:, offset : offset + nbytes].reshape(-1)  # only the last rows can be padding
        yield joined[: tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape)


def _part_bytes(tensor: torch.Tensor, dtype: torch.dtype, ranks: int) -> int:
    """Of rank 0's part, which no other one exceeds."""
    return math.ceil(tensor.shape[0] / ranks) * math.prod(tensor.shape[1:]) * dtype.itemsize
