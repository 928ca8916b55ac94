"""What an adapter publishes: its matrices, with B scaled as generators keep it."""

from __future__ import annotations

import torch
from torch import nn

from inflight.types import ParamMeta
from inflight.weights.source import WIRE_DTYPES, WeightSource


class AdapterSource(WeightSource):
    """The matrices of a LoRA adapter as they are sent: `*.lora_A.weight`, and `*.lora_B.weight` times `scaling`.

    B is rounded to the wire dtype before it is scaled, which is what vLLM does to an adapter that it loads from a disk.
    """

    def __init__(self, module: nn.Module, wire_dtype: str, scaling: float, base: str | None = None) -> None:
        """`module` has no parameters but the adapter's; `base` is the digest of the weights that it is added to, which
        its manifest names. Raises SourceError as WeightSource does."""
        super().__init__(module, wire_dtype)
        self._scaling = scaling
        self.base = base

    def _as_planned(self, meta: ParamMeta) -> torch.Tensor:
        tensor = super()._as_planned(meta)
        if self._scaling == 1 or not meta.name.endswith(".lora_B.weight"):
            return tensor
        return tensor.detach().to(WIRE_DTYPES[meta.dtype]) * self._scaling
