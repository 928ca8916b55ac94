"""Replays a run that trained a LoRA adapter: PEFT's layers over the run's base."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from inflight.audit.replay import AuditError, KeptVersions, TransformersReplayer
from inflight.base_digest import base_digest, require_base
from inflight.config import Sampling
from inflight.config.lora import LoraConfig
from inflight.peft_layers import matrices_of, with_adapter


def _require_base(kept: KeptVersions, model_dir: Path) -> None:
    try:
        digest = base_digest(model_dir)
        for path in sorted(kept.folder.glob("*.safetensors")):
            require_base(path, digest, model_dir)
    except (ValueError, OSError, SafetensorError) as error:
        raise AuditError(str(error)) from None


class AdapterReplayer(TransformersReplayer):
    """Through plain transformers and PEFT. The kept versions are the adapter's matrices, B scaled already."""

    def __init__(
        self,
        model_dir: Path,
        kept: KeptVersions,
        sampling: Sampling,
        settings: LoraConfig,
        *,
        base_dtype: torch.dtype,
        dtype: torch.dtype = torch.float32,
        token_by_token: bool = False,
        device: str = "cpu",
    ) -> None:
        """`settings` are the run's, and `base_dtype` is that in which its base computed: its weights are rounded to
        that. Raises as TransformersReplayer does, AuditError for versions that were trained on another base than that
        of `model_dir`, and ConfigError without PEFT."""
        _require_base(kept, model_dir)
        self._settings = settings
        self._base_dtype = base_dtype
        super().__init__(model_dir, kept, sampling, dtype=dtype, token_by_token=token_by_token, device=device)
        self._matrices = dict(matrices_of(self._model))

    def _make_model(self, model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
        """The base with its weights, and an adapter whose matrices come with each version."""
        base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self._base_dtype, attn_implementation="eager"
        )
        torch.nn.Module.to(base, dtype)  # not transformers' own, whose types are wrong
        with_adapter(base, self._settings.rank, self._settings.target_modules)
        return base

    def _use(self, state: dict[str, torch.Tensor]) -> None:
        if strange := sorted(state.keys() ^ self._matrices.keys()):
            raise ValueError(f"it differs from the run's adapter in {strange[0]}")
        with torch.no_grad():
            for name, matrix in self._matrices.items():
                matrix.copy_(state[name])
