"""Converts micro-batches and their results to and from messages, field by field: tensors and counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch

from inflight.messages.ranks import TensorData

_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Record = TypeVar("Record")


class RankDataError(ValueError):
    """A message whose fields do not make such a record; names the field."""


def to_wire(record: Any) -> dict[str, Any]:
    """The tensors and counts of a dataclass by field; fields that are None are omitted."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {
        name: tensor_to_wire(value) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
        if value is not None
    }


def from_wire(kind: type[Record], parcel: Mapping[str, TensorData | dict[str, int]]) -> Record:
    """The record of a message. Raises RankDataError for unknown or missing fields, and for bytes that do not fit the
    claimed shape and dtype."""
    values = {
        name: tensor_from_wire(name, each) if isinstance(each, TensorData) else each for name, each in parcel.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise RankDataError(f"not a {kind.__name__}: {error}") from None


def tensor_to_wire(tensor: torch.Tensor) -> TensorData:
    """A tensor by value, on the CPU."""
    plain = tensor.contiguous().cpu()
    return TensorData(dtype=_NAMES[plain.dtype], shape=list(plain.shape), data=plain.numpy().tobytes())


def tensor_from_wire(name: str, data: TensorData) -> torch.Tensor:
    """The tensor of a message. Raises RankDataError, which names it, for bytes that do not fit its shape and dtype."""
    dtype = _DTYPES[data.dtype]
    if len(data.data) != math.prod(data.shape) * dtype.itemsize:
        raise RankDataError(f"{name} of shape {data.shape} in {data.dtype} can't have {len(data.data)} bytes")
    if not data.data:
        return torch.zeros(data.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.data), dtype=dtype).view(data.shape)
