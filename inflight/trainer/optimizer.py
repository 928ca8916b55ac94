"""AdamW over a model's parameters, and which of them decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inflight.config import TrainerConfig
from inflight.trainer.schedule import rate_factor


def make_optimizer(model: nn.Module, settings: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101) with `trainer.weight_decay` on matrices alone.

    Parameters of one dimension, which are the biases and the weights of norms, do not decay: decay would draw what they
    scale to 0. Order and names of the parameters' state do not depend on it.
    """
    parameters = list(model.parameters())
    decayed = [each for each in parameters if each.ndim > 1]
    plain = [each for each in parameters if each.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def make_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainerConfig, step: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The optimizer's learning rate for the step after `step` steps, and for those that follow, one per call of `step`.

    Raises ConfigError for a schedule that can't be used.
    """
    factor = rate_factor(settings)
    for group in optimizer.param_groups:
        group["initial_lr"] = settings.learning_rate
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=step - 1)
