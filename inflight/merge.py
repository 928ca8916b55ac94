"""An adapter's checkpoint merged into its base: a model directory that needs no PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from inflight.base_digest import base_digest, require_base
from inflight.models.weight_files import ADAPTER, ADAPTER_WEIGHTS

BASE_KEY = "base_model_name_or_path"


class MergeError(ValueError):
    """An adapter that can't be merged; one line that says why."""


def merge(checkpoint: Path, out: Path, dtype: torch.dtype) -> None:
    """Writes the base with `checkpoint`'s adapter added to its weights, computed in float32, into the directory `out`.

    Raises MergeError when PEFT is not installed or the base or the adapter can't be loaded, OSError when `out` can't be
    written.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise MergeError("--merge needs PEFT: pip install 'inflight[lora]'") from None
    from transformers import AutoModelForCausalLM

    base = json.loads((checkpoint / ADAPTER).read_bytes())[BASE_KEY]
    try:
        if (folder := Path(base)).is_dir():
            require_base(checkpoint / ADAPTER_WEIGHTS, base_digest(folder), folder)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged = PeftModel.from_pretrained(model, checkpoint).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise MergeError(f"{checkpoint} can't be merged into its base {base}: {reason}") from None
    merged.to(dtype).save_pretrained(out)
