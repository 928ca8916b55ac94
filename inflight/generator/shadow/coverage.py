"""Checks on the meta device that a manifest covers an engine's model: no weights move, nothing is allocated.

vLLM's own loaders are run once over meta tensors of the manifest's shapes into a template's meta parameters
(template.py), and every write is counted. Thus fused projections, tensor-parallel slices and vocabulary padding are
judged by the same code that will load the real bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from inflight.generator.shadow.loader_trace import LoaderTrace, storage_of
from inflight.messages import Manifest, Slot
from inflight.weights.receive.shadow import ManifestMismatch

MAX_NAMED = 3
"""Most names that an error lists; the rest are counted."""


class CoverageError(ManifestMismatch):
    """A manifest that does not fit the engine's model; the text names the parameters or tensors."""


def check_coverage(template: torch.nn.Module, manifest: Manifest, tensor_parallel_size: int) -> None:
    """Raises CoverageError unless the manifest writes every element of every parameter of the template exactly once.

    `template` is a vLLM model whose parameters are on the meta device. It refuses a parameter that is missing or partly
    missing, a tensor that the model does not know or does not read whole, and a wrong shape or dtype.
    """
    parameters = dict(template.named_parameters())
    with torch.no_grad(), _Writes(manifest, parameters, tensor_parallel_size) as writes:
        try:
            template.load_weights(writes.checkpoint())  # type: ignore[operator]
        except CoverageError:
            raise
        except Exception as error:  # loaders may raise anything, from AssertionError to KeyError
            raise CoverageError.by_loader(writes.given, error) from error
    writes.check_sources(manifest)
    if missing := [name for name, param in parameters.items() if writes.written[name] < param.numel()]:
        raise CoverageError(f"the manifest does not cover {_some(missing)} of the engine")
    if twice := [name for name, param in parameters.items() if writes.written[name] > param.numel()]:
        raise CoverageError(f"the manifest covers {_some(twice)} of the engine more than once")


def _some(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class _Writes(LoaderTrace):
    """Counts the elements written to each parameter, and which source each write came from."""

    def __init__(
        self, manifest: Manifest, parameters: dict[str, torch.nn.Parameter], tensor_parallel_size: int
    ) -> None:
        super().__init__(manifest.slots)
        self._tensor_parallel_size = tensor_parallel_size
        self._targets = {storage_of(param): name for name, param in parameters.items()}
        self.written: dict[str, int] = defaultdict(int)
        self._read: dict[str, int] = {}
        """Source name → number of elements that the model read; absent: the tensor was not read at all."""
        self._into: dict[str, str] = {}
        """Source name → the parameter that it was last written to."""

    @property
    def given(self) -> str:
        """The tensor that the loader was given last, for an error message."""
        return f"{self.current.meta.name} {list(self.current.meta.shape)}" if self.current else "the first tensor"

    def check_sources(self, manifest: Manifest) -> None:
        """Raises CoverageError for a tensor that the model does not read, or reads only in part.

        Slices are cut by `narrow`, which takes the front of a tensor that is too long. The sizes of a vocabulary are
        checked by its loader, and a rank's slice of it may be empty.
        """
        if unread := [slot.meta.name for slot in manifest.slots if slot.meta.name not in self._read]:
            raise CoverageError(f"the engine has no parameter for {_some(unread)}")
        for meta in (slot.meta for slot in manifest.slots):
            name = self._into[meta.name]
            taken = self._read[meta.name] * self._tensor_parallel_size
            if taken < meta.numel and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
                raise CoverageError(f"{meta.name} {list(meta.shape)} is larger than {name} of the engine takes")

    def is_target(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._targets

    def copied(self, target: torch.Tensor, source: torch.Tensor, slot: Slot | None) -> None:
        source.expand(target.shape)  # raises where a copy would
        if slot is None:
            return
        name = self._targets[storage_of(target)]
        origin = slot.meta.name
        self.written[name] += target.numel()
        self._read[origin] = self._read.get(origin, 0) + source.numel()
        self._into[origin] = name
        if target.dtype != source.dtype:
            raise CoverageError(f"{origin} is {source.dtype}, {name} of the engine is {target.dtype}")

    def filled(self, target: torch.Tensor) -> None:
        self.written[self._targets[storage_of(target)]] += target.numel()

    def changed(self, func: Any) -> None:
        """An in-place computation counts as no write: the parameter is reported as not covered."""

    def made(self, result: torch.Tensor, inputs: Sequence[Any]) -> None:
        """A loader may reshape or transpose into new storage before it copies; the values then come from its inputs."""
        for each in inputs:
            if isinstance(each, torch.Tensor) and (slot := self._origins.get(storage_of(each))):
                self._origins.setdefault(storage_of(result), slot)
                self._kept.append(result)
