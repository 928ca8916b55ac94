"""Models to compute with, from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from inflight.trainer.logprobs import require_plain_logits
from inflight.trainer.varlen import VARLEN, fits


def attention_for(device: torch.device, dtype: torch.dtype, *, packing: bool) -> str:
    """transformers' name of the attention that a model computes with there, in this dtype."""
    if device.type == "cpu":  # the backward pass of torch's fused attention takes twice as long there, at short lengths
        return "eager"
    return VARLEN if packing and dtype in (torch.bfloat16, torch.float16) else "sdpa"


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device, *, attention: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A whole model, in evaluation mode.

    Raises OSError or ValueError when it can't be loaded or its logits are not plain.
    """
    disable_progress_bar()
    try:  # loaded in `dtype`, not cast: a cast would round the rotary frequencies, which stay float32
        model, found = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            ),
        )
    except SafetensorError as error:
        raise ValueError(f"{directory} can't be loaded: {error}") from None
    made_up = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if made_up:  # transformers initialises these randomly without an error
        raise ValueError(f"{directory} can't be loaded: its weights do not have {made_up[0]}, or in another shape")
    ready(model).to(device)  # type: ignore[arg-type]  # transformers wraps it and hides `self`
    return model


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """The model, to compute with. Raises ValueError when its logits are not plain."""
    require_plain_logits(model)
    if model.config._attn_implementation == VARLEN and not fits(model.config):
        model.set_attn_implementation("sdpa")
    return model.eval()  # dropout would be noise in the ratio
