"""Names of the files in a model's directory that say where its weights are, as transformers, PEFT and vLLM have
them."""

from __future__ import annotations

WHOLE = "model.safetensors"
"""All weights, where they are in one file."""
INDEX = "model.safetensors.index.json"
"""Which file has which tensor, where they are in several."""
ADAPTER = "adapter_config.json"
"""A directory with this file is an adapter's."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
