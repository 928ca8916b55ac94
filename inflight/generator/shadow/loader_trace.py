"""Runs vLLM's own weight loader over tensors that exist in shape only, and catches each write to a parameter.

vLLM fuses q, k, v and gate, up, splits by tensor-parallel rank, replicates KV heads, pads the vocabulary and ties
embeddings; its `load_weights` knows how, for every model. Checkpoint tensors on the meta device carry offset and
strides, so each write that is caught says exactly which elements of which tensor go where, for a model of any size, in
seconds and without memory. No write is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.messages import Slot

FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
"""How loaders fill the padding of a vocabulary."""


class LoaderTrace(TorchDispatchMode):
    """A mode to call `load_weights(trace.checkpoint())` in. Subclasses say what a target is and what a write means."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        self._slots = slots
        self._origins: dict[int, Slot] = {}
        """Storage → the slot that its values come from."""
        self._kept: list[torch.Tensor] = []
        """Keeps storages alive: the identity of a freed one could be given to another."""
        self.current: Slot | None = None
        """What the loader was given last; None before the first."""

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A meta tensor for every slot, as `load_weights` takes them."""
        for slot in self._slots:
            self.current = slot
            tensor = torch.empty(slot.meta.shape, dtype=getattr(torch, slot.meta.dtype), device="meta")
            self._origins[storage_of(tensor)] = slot
            self._kept.append(tensor)
            yield slot.meta.name, tensor

    def is_target(self, tensor: torch.Tensor) -> bool:
        """Whether it is (part of) a parameter whose writes are caught."""
        raise NotImplementedError

    def copied(self, target: torch.Tensor, source: torch.Tensor, slot: Slot | None) -> None:
        """`source` would be copied to `target`; its values come from `slot`, None: from no checkpoint tensor."""
        raise NotImplementedError

    def filled(self, target: torch.Tensor) -> None:
        """`target` would be filled with a constant."""
        raise NotImplementedError

    def changed(self, func: Any) -> None:
        """A target would be changed by `func`, which neither copies nor fills."""
        raise NotImplementedError

    def made(self, result: torch.Tensor, inputs: Sequence[Any]) -> None:
        """`result` was computed. By default it comes from no checkpoint tensor unless it is a view of one."""

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
    """The identity of a tensor's storage, while that lives."""
    return tensor.untyped_storage()._cdata
