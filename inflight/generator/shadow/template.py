"""A second instance of the engine's model on the meta device, into which a version is loaded."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from inflight.generator.shadow.limits import UnsupportedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_model(live: torch.nn.Module) -> None:
    """Raises UnsupportedModel for a loaded model whose weights are not all, and only, parameters of its modules."""
    if hasattr(live, "process_weights_after_loading"):
        raise UnsupportedModel("swapping weights on CPU does not support a model with post-processing of its own")
    if held := _held_outside(live):
        raise UnsupportedModel(f"swapping weights on CPU does not support {held}: its module is not its only owner")


def _held_outside(live: torch.nn.Module) -> str | None:
    """The name of a parameter that a plain attribute, or an object in one, refers to: rebinding would miss that."""
    # Emptied weights of packed layers all have the null pointer as their address.
    names = {param.data_ptr(): name for name, param in live.named_parameters() if param.numel()}
    for module in live.modules():
        for value in vars(module).values():
            inside = [] if isinstance(value, torch.nn.Module | type) else list(getattr(value, "__dict__", {}).values())
            for tensor in (value, *inside):
                if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.data_ptr() in names:
                    return names[tensor.data_ptr()]
    return None


def make_template(vllm_config: VllmConfig) -> torch.nn.Module:
    """The engine's model as vLLM constructs it, with meta parameters that carry vLLM's weight loaders.

    Temporarily sets torch's default dtype, which is global: call it while no other thread runs, in `load_model`.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    # Layers register themselves here by name; in the engine's own tables they would clash with the live ones.
    fresh: dict[str, Any] = {
        "static_forward_context": {},
        "static_all_moe_layers": [],
        "enabled_custom_ops": Counter(),
        "disabled_custom_ops": Counter(),
    }
    for name, value in fresh.items():
        setattr(config.compilation_config, name, value)
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        template = initialize_model(config)
    seen: dict[int, torch.nn.Parameter] = {}
    for module in template.modules():
        for name, param in module._parameters.items():
            # vLLM's backend for transformers' own models allocates some parameters in spite of the context.
            if param is not None and not param.is_meta:
                module._parameters[name] = seen.setdefault(id(param), like(param, "meta"))
    return template


def like(prototype: torch.nn.Parameter, device: str) -> torch.nn.Parameter:
    """An uninitialised parameter on `device`, with the prototype's class and attributes, weight loaders among them."""
    param = torch.nn.Parameter(torch.empty_like(prototype, device=device), requires_grad=False)
    param.__class__ = prototype.__class__
    param.__dict__ = prototype.__dict__.copy()
    return param
