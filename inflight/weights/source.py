"""The parameters that a model publishes: names, shapes and wire dtypes in advance, the tensors in the same order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from inflight.types import DTYPE_BYTES, ParamMeta
from inflight.weights.shards import is_sharded, whole

WIRE_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that can be sent, by their names in ParamMeta."""

_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}
assert WIRE_DTYPES.keys() == DTYPE_BYTES.keys()


class SourceError(ValueError):
    """A module that can't be published as it is; the text names the parameter."""


class WeightSource:
    """The parameters and persistent buffers of a module, as they are sent.

    * Order: registration order of the module's parameters, then of its persistent buffers. It depends on the module
      alone, so every rank that holds the same module iterates alike; that matters where reading a parameter is a
      collective (FSDP2), which deadlocks when the ranks disagree.
    * Parameters that share storage (same memory, offset, shape and strides) are sent once, under the first name; `tied`
      maps each further name to it.
    * Parameters are sent in `wire_dtype`. Persistent floating-point buffers are sent too, in their own dtype: they are
      not trained and often float32 for a reason (a router's bias). Non-persistent buffers (rotary `inv_freq`) are
      computed from the configuration on each side and are not sent.
    * Refused, by name, because the generators would keep an old or wrong value: meta tensors, integer or other
      dtypes that can't be sent.

    Example: `WeightSource(model, "bfloat16").metas[0]` is
    `ParamMeta(name="model.embed_tokens.weight", shape=(49152, 576), dtype="bfloat16")`.
    """

    base: str | None = None
    """Of an adapter: the digest of the weights that it is added to."""

    def __init__(self, module: nn.Module, wire_dtype: str | torch.dtype) -> None:
        """Raises SourceError that names the parameter, buffer or dtype that can't be sent. Reads no tensor's values."""
        wire = wire_dtype if isinstance(wire_dtype, str) else _NAMES.get(wire_dtype, str(wire_dtype))
        if wire not in WIRE_DTYPES:
            raise SourceError(f"wire dtype {wire} can't be sent: {', '.join(WIRE_DTYPES)} can")
        self._module = module
        self.metas: list[ParamMeta] = []
        self.tied: dict[str, str] = {}
        first: dict[tuple[object, ...], str] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        tensors = parameters | _persistent_buffers(module)
        for name, tensor in tensors.items():
            _require_publishable(name, tensor)
            travelling = first.setdefault(_storage_key(tensor), name)
            if travelling != name:
                self.tied[name] = travelling
            else:
                dtype = wire if name in parameters else _NAMES[tensor.dtype]
                self.metas.append(ParamMeta(name=name, shape=tuple(tensor.shape), dtype=dtype))
        self._places = {name: _split(name) for name in tensors}
        """Name → the names of the modules down to the owner, and the owner's name for it."""
        if not self.metas:
            raise SourceError(f"{type(module).__name__} has no parameters to publish")

    @property
    def device(self) -> torch.device:
        """Device of the first parameter; decides the transport when none is configured."""
        return self._read(self.metas[0].name).device

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full detached tensor) in the order of `metas`, read anew: the parameters' current values.

        Sharded parameters are gathered and cast (weights/shards.py), so a round never holds more than a bucket of
        full ones in addition to the shards. Raises SourceError when the module has changed its parameters: one is
        gone, has another shape, or a tie was broken (the alias would silently keep its old value in the generators).
        """
        for alias, travelling in self.tied.items():
            if _storage_key(self._read(alias)) != _storage_key(self._read(travelling)):
                raise SourceError(f"{alias} no longer shares its storage with {travelling}: make a new WeightSource")
        tensors = whole((self._as_planned(meta).detach(), WIRE_DTYPES[meta.dtype]) for meta in self.metas)
        for meta, tensor in zip(self.metas, tensors, strict=True):
            yield meta.name, tensor

    def _as_planned(self, meta: ParamMeta) -> torch.Tensor:
        tensor = self._read(meta.name)
        if tuple(tensor.shape) != meta.shape:
            raise SourceError(f"{meta.name} has changed its shape from {meta.shape} to {tuple(tensor.shape)}")
        return tensor

    def _read(self, name: str) -> torch.Tensor:
        path, leaf = self._places[name]
        owner: nn.Module | None = self._module
        for part in path:  # get_submodule takes three quarters of the time to pack an adapter
            owner = owner._modules.get(part) if owner is not None else None
        tensor = owner._parameters.get(leaf) if owner is not None else None
        if tensor is None:  # a buffer, or what has become an ordinary attribute or a computed one
            tensor = getattr(owner, leaf, None)
        if not isinstance(tensor, torch.Tensor):
            raise SourceError(f"{name} is missing from the module that had it when the source was made")
        _require_publishable(name, tensor)
        return tensor


def _split(name: str) -> tuple[list[str], str]:
    *path, leaf = name.split(".")
    return path, leaf


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the state dict, by name."""
    found: dict[str, torch.Tensor] = {}
    for path, child in module.named_modules():
        for leaf, buffer in child.named_buffers(recurse=False):
            if leaf not in child._non_persistent_buffers_set:
                found[f"{path}.{leaf}" if path else leaf] = buffer
    return found


def _require_publishable(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise SourceError(f"{name} is on the meta device: it has no values to publish")
    if tensor.dtype not in _NAMES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise SourceError(f"{name} is {dtype}: only {', '.join(WIRE_DTYPES)} can be sent")


def _storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are views of the same memory with the same shape and strides.

    Shards and empty tensors have no address that means the same on every rank, so object identity is used: two names of
    one sharded parameter are one Python object.
    """
    if is_sharded(tensor) or tensor.numel() == 0:
        return ("object", id(tensor))
    storage = tensor.untyped_storage().data_ptr()
    return (tensor.device, storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
