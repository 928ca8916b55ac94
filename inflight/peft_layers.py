"""PEFT's LoRA layers in a transformers model: for the trainer, which trains them, and the audit, which replays them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.config import ConfigError
from inflight.config.lora import UNSUPPORTED
from inflight.error_line import one_line

_PREFIX = "base_model.model."
"""Of every name in a PEFT checkpoint."""
_ADAPTER = "default"
"""PEFT's name of the adapter within the model."""


def with_adapter(model: PreTrainedModel, rank: int, targets: list[str], device: torch.device | None = None) -> None:
    """Puts PEFT's layers, of factor 1, onto the linear layers named by `targets` (none: all but the output layer), and
    freezes all else. With a `device` the matrices are there, with undefined values: the model may have none yet.

    Raises ConfigError when PEFT is not installed, or a module can't have an adapter that generators swap.
    """
    try:
        from peft import LoraConfig as Peft
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("trainer.lora.rank needs PEFT: pip install 'inflight[lora]'") from None
    described = Peft(r=rank, lora_alpha=rank, target_modules=targets or _linear(model), task_type="CAUSAL_LM")
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(described, model, _ADAPTER)
    except ValueError as error:
        text = one_line(str(error).split(". ")[0])
        raise ConfigError(f"trainer.lora.target_modules={targets} does not fit the model: {text}") from None
    for name, twin in matrices_of(model):
        module = name.removeprefix(_PREFIX).rpartition(".lora_")[0]
        if module.rpartition(".")[2] in UNSUPPORTED or "experts" in module:
            raise ConfigError(f"trainer.lora.target_modules: {module} can't have an adapter that generators swap")
        twin.requires_grad_(True)
    for layer in _layers(model) if device is not None else ():
        layer.lora_A.to_empty(device=device)
        layer.lora_B.to_empty(device=device)


def _linear(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers, without the output layer."""
    head = model.get_output_embeddings()
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(found)


def matrices_of(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapter's matrices in a model with PEFT's layers, by their names in a PEFT checkpoint."""
    for name, parameter in model.named_parameters():
        if f".{_ADAPTER}." in name and ".lora_" in name:
            yield _PREFIX + name.replace(f".{_ADAPTER}.", "."), parameter


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """While it is open, PEFT's layers give the base's outputs."""
    layers = _layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(model: PreTrainedModel) -> list[Any]:
    """PEFT's layers in a model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
