"""An adapter's checkpoint merged into its base: a model directory that needs no PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from inflight.base_digest import base_digest, require_base
from inflight.error_line import one_line, with_kind
from inflight.models.weight_files import ADAPTER, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from peft import PeftModel

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

    base = _base_of(checkpoint / ADAPTER)
    try:
        if (folder := Path(base)).is_dir():
            require_base(checkpoint / ADAPTER_WEIGHTS, base_digest(folder), folder)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(model, checkpoint)
        _require_all_placed(adapted, checkpoint / ADAPTER_WEIGHTS)
        merged = adapted.merge_and_unload()
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, SafetensorError) as error:
        reason = one_line(error)
        raise MergeError(f"{checkpoint} can't be merged into its base {base}: {reason}") from None
    merged.to(dtype).save_pretrained(out)


def _base_of(description: Path) -> str:
    """The base that an adapter names. Raises MergeError."""
    try:
        return str(json.loads(description.read_bytes())[BASE_KEY])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise MergeError(f"the base of the adapter can't be read from {description}: {with_kind(error)}") from None


def _require_all_placed(adapted: PeftModel, weights: Path) -> None:
    """Raises ValueError unless an adapter's file has each tensor that its description asks for, and no other: PEFT only
    warns of those that are missing, whose layers would stay the base's."""
    from peft import get_peft_model_state_dict

    with safe_open(weights, framework="pt") as file:
        given = set(file.keys())
    asked = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if differ := sorted(asked - given):
        raise ValueError(f"{weights.name} has no {differ[0]}, which {ADAPTER} asks for")
    if differ := sorted(given - asked):
        raise ValueError(f"{weights.name} has {differ[0]}, which {ADAPTER} does not ask for")
