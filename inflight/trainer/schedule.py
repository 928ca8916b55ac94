"""The learning rate at each version, by transformers' schedules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import cast

import torch
from transformers import get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

from inflight.config import ConfigError, TrainerConfig, require

_GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
"""Arguments of transformers' functions that are no options."""


def rate_factor(settings: TrainerConfig) -> Callable[[int], float]:
    """Factor of `trainer.learning_rate` in the n-th step of a run, from 0.

    It depends on nothing but n, so that a run that is resumed continues where it was. The step of a warm-up is counted
    from 1, where transformers counts from 0: at a learning rate of 0 a version would be published that equals the one
    before. Raises ConfigError for options that the schedule does not have or can't compute with.
    """
    schedule = settings.schedule
    shift = 1 if settings.warmup_steps else 0
    name = "constant_with_warmup" if schedule.name == "constant" else schedule.name
    function = cast("Callable[..., object]", TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)])
    known = [] if schedule.constant else sorted(inspect.signature(function).parameters.keys() - _GIVEN)
    for option in schedule.options:
        allowed = f"options of {schedule.name}: {', '.join(known) or 'none'}"
        require(option in known, f"trainer.schedule.options.{option}", schedule.options[option], allowed)
    rate = torch.nn.Parameter(torch.zeros(1))
    try:
        made = get_scheduler(
            name,
            torch.optim.SGD([rate], lr=settings.learning_rate),
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=settings.steps + shift,
            scheduler_specific_kwargs=dict(schedule.options),
        )
        (factor,) = made.lr_lambdas
        for step in {0, settings.warmup_steps, settings.steps // 2, settings.steps - 1}:
            if not (math.isfinite(value := factor(step + shift)) and value >= 0):
                raise ValueError(f"the learning rate of step {step + 1} would be {value:g} times trainer.learning_rate")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"trainer.schedule.name={schedule.name!r} can't be used: {error}") from None
    return lambda step: float(factor(step + shift))
