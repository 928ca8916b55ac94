"""Gradient checkpointing: a layer's activations are computed again in the backward pass, not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(model: PreTrainedModel) -> None:
    """From now on each decoder layer keeps only its input for the backward pass.

    transformers does so for a layer in training mode only. The model stays in evaluation mode, without dropout: the
    mode of the layer itself is what switches recomputation on, and inside the layer it is evaluation again. Raises
    ValueError for a model whose layers can't be recomputed.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise ValueError(f"trainer.gradient_checkpointing=true: {type(model).__name__} has no layers that support it")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer._gradient_checkpointing_func = _recomputed(layer)
        layer.training = True


def _recomputed(layer: GradientCheckpointingLayer) -> Callable[..., Any]:
    def run(forward: Callable[..., Any], *inputs: Any) -> Any:
        def evaluated(*given: Any) -> Any:
            layer.training = False
            try:
                return forward(*given)
            finally:
                layer.training = True

        # Nothing in evaluation mode draws random numbers, so their state need not be kept.
        return checkpoint(evaluated, *inputs, use_reentrant=False, preserve_rng_state=False)

    return run
