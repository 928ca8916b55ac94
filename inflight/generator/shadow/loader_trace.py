"""Runs vLLM's own weight loader over tensors that have only a shape, and records each write to a parameter.

vLLM fuses q, k, v and gate, up, splits by tensor-parallel rank, replicates KV heads, pads the vocabulary and ties
embeddings; its `load_weights` implements this for every model. Checkpoint tensors on the meta device carry offset and
strides, so each recorded write says exactly which elements of which tensor go where, for a model of any size, in
seconds and without memory. The writes are not carried out. A `Slot` is here a parameter's place in the send buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.messages import Slot

FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
"""Operations by which loaders fill the padding of a vocabulary."""


class LoaderTrace(TorchDispatchMode):
    """A mode in which to call `load_weights(trace.checkpoint())`. Subclasses define targets and what a write means."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        self._slots = slots
        self._origins: dict[int, Slot] = {}
        """Storage → the slot that its values come from."""
        self._kept: list[torch.Tensor] = []
        """Keeps storages alive: the id of a freed one could be reused."""
        self.current: Slot | None = None
        """The slot that the loader was given last; None before the first."""

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, meta tensor) for every slot, as `load_weights` expects them."""
        for slot in self._slots:
            self.current = slot
            tensor = torch.empty(slot.meta.shape, dtype=getattr(torch, slot.meta.dtype), device="meta")
            self._origins[storage_of(tensor)] = slot
            self._kept.append(tensor)
            yield slot.meta.name, tensor

    def is_target(self, tensor: torch.Tensor) -> bool:
        """Whether it is (part of) a parameter whose writes are recorded."""
        raise NotImplementedError

    def copied(self, target: torch.Tensor, source: torch.Tensor, slot: Slot | None) -> None:
        """`source` would be copied to `target`. Its values come from `slot`; None: not from a checkpoint tensor."""
        raise NotImplementedError

    def filled(self, target: torch.Tensor) -> None:
        """`target` would be filled with a constant."""
        raise NotImplementedError

    def changed(self, func: Any) -> None:
        """A target would be changed by `func`, which is neither a copy nor a fill."""
        raise NotImplementedError

    def made(self, result: torch.Tensor, inputs: Sequence[Any]) -> None:
        """`result` was computed. By default only views of a checkpoint tensor count as coming from one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [args[i] for i, arg in enumerate(func._schema.arguments[: len(args)]) if writes(arg)]
        targets = [each for each in written if isinstance(each, torch.Tensor) and self.is_target(each)]
        if not targets:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.made(result, args)
            return result
        if func is torch.ops.aten.copy_.default:
            source = args[1]
            self.copied(args[0], source, self._origins.get(storage_of(source)) if source.is_meta else None)
        elif func in FILLS:
            self.filled(args[0])
        else:
            self.changed(func)
        return args[0]


def writes(argument: Any) -> bool:
    """Whether an operation writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage, for as long as the storage lives."""
    return tensor.untyped_storage()._cdata
