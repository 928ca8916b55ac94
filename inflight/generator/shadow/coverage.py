"""Does a manifest cover an engine's model? Answered on the meta device: no weights move, nothing is allocated.

vLLM's own loaders are run once over meta tensors of the manifest's shapes into the meta parameters of a template, and
every write is counted. Thus fused projections, tensor-parallel slices and vocabulary padding are judged by the very
code that will load the real bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.messages import Manifest
from inflight.weights.receive.shadow import Unfit

MAX_NAMED = 3
"""Names that an error lists; the rest is counted."""
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""How loaders fill the padding of a vocabulary."""


class CoverageError(Unfit):
    """A manifest that does not fit the engine's model; the text names the parameters or tensors."""


def check_coverage(template: torch.nn.Module, manifest: Manifest, tensor_parallel_size: int) -> None:
    """Raises CoverageError unless the manifest writes every element of every parameter of the template exactly once.

    `template` is a vLLM model whose parameters are on the meta device. Refused are: a parameter that is missing or
    partly missing, a tensor that the model does not know or does not read whole, another shape, another dtype.
    """
    parameters = dict(template.named_parameters())
    with torch.no_grad(), _Ledger(parameters, tensor_parallel_size) as ledger:
        try:
            template.load_weights(ledger.sources(manifest))  # type: ignore[operator]
        except CoverageError:
            raise
        except Exception as error:  # loaders raise whatever they like, from AssertionError to KeyError
            raise CoverageError.by_loader(ledger.current, error) from error
    ledger.check_sources(manifest)
    if missing := [name for name, param in parameters.items() if ledger.written[name] < param.numel()]:
        raise CoverageError(f"the manifest does not cover {_some(missing)} of the engine")
    if twice := [name for name, param in parameters.items() if ledger.written[name] > param.numel()]:
        raise CoverageError(f"the manifest covers {_some(twice)} of the engine more than once")


def _some(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class _Ledger(TorchDispatchMode):
    """Counts the elements written to each parameter, and notes which source each write came from."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], tensor_parallel_size: int) -> None:
        super().__init__()
        self._tensor_parallel_size = tensor_parallel_size
        self._targets = {_storage(param): name for name, param in parameters.items()}
        self._origins: dict[int, str] = {}
        """Storage → the source that its values come from."""
        self._kept: list[torch.Tensor] = []
        """Keeps storages alive: a freed one's identity could come back as another's."""
        self.written: dict[str, int] = defaultdict(int)
        self._read: dict[str, int] = {}
        """Source name → elements that the model read; absent: it did not read it at all."""
        self._into: dict[str, str] = {}
        """Source name → the parameter that it went to last."""
        self.current = "the first tensor"

    def sources(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """A meta tensor for every slot, as `load_weights` wants them."""
        for meta in (slot.meta for slot in manifest.slots):
            self.current = f"{meta.name} {list(meta.shape)}"
            tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            self._origins[_storage(tensor)] = meta.name
            self._kept.append(tensor)
            yield meta.name, tensor

    def check_sources(self, manifest: Manifest) -> None:
        """Raises CoverageError for a tensor that the model does not read, or not to its end.

        Slices are cut by `narrow`, which takes the front of a tensor that is too long. A vocabulary is checked by its
        loader, and a rank's slice of it may be empty.
        """
        if unread := [slot.meta.name for slot in manifest.slots if slot.meta.name not in self._read]:
            raise CoverageError(f"the engine has no use for {_some(unread)}")
        for meta in (slot.meta for slot in manifest.slots):
            name = self._into[meta.name]
            taken = self._read[meta.name] * self._tensor_parallel_size
            if taken < meta.numel and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
                raise CoverageError(f"{meta.name} {list(meta.shape)} is larger than {name} of the engine takes")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copy(args[0], args[1])
        elif func in _FILLS and (name := self._targets.get(_storage(args[0]))):
            self.written[name] += args[0].numel()
        result = func(*args, **(kwargs or {}))
        # A loader may reshape or transpose into new storage before it copies: what it makes comes from its inputs.
        if isinstance(result, torch.Tensor) and _storage(result) not in self._targets:
            for arg in args:
                if isinstance(arg, torch.Tensor) and _storage(arg) in self._origins:
                    self._origins.setdefault(_storage(result), self._origins[_storage(arg)])
                    self._kept.append(result)
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name, origin = self._targets.get(_storage(target)), self._origins.get(_storage(source))
        if name is None or origin is None:
            return
        self.written[name] += target.numel()
        self._read[origin] = self._read.get(origin, 0) + source.numel()
        self._into[origin] = name
        if target.dtype != source.dtype:
            raise CoverageError(f"{origin} is {source.dtype}, {name} of the engine is {target.dtype}")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
