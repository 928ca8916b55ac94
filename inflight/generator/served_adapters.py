"""The names of adapters in vLLM's server: `model` of a request selects one."""

from __future__ import annotations

from typing import Any

from inflight.config import RunConfig
from inflight.generator.engine_args import adapters_of
from inflight.generator.settings import Settings

NOWHERE = "inflight://"
"""vLLM wants a path of every adapter. It is never read: the adapter lies in its slot before the first request."""


def add_adapters(models: Any, config: RunConfig) -> None:
    """Adds the run's adapter to `models`, vLLM's OpenAIServingModels, which would load it from a disk itself."""
    if not (names := adapters_of(config)):
        return
    from vllm.lora.request import LoRARequest

    for name, adapter in Settings(adapters=names).adapter_ids.items():
        models.lora_requests[name] = LoRARequest(name, adapter, NOWHERE + name, models.base_model_paths[0].name)
