"""Gradient and optimizer step of one batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator

from inflight.config import RunConfig
from inflight.trainer.batch import Batch
from inflight.trainer.logprobs import token_logprobs
from inflight.trainer.loss import Stats, combine, objective
from inflight.trainer.policy import Policy


class Stopped(Exception):
    """The step was given up half-way, before anything of the weights was changed."""


class LearnError(RuntimeError):
    """A step that must not be taken: its loss or gradient is not finite."""


def warmup(steps: int) -> Callable[[int], float]:
    """Factor of the learning rate at the n-th step (from 0): rises evenly over `steps` steps to 1 and stays."""
    return lambda step: min(1.0, (step + 1) / steps) if steps else 1.0


class Learner:
    """AdamW over a policy's master weights."""

    def __init__(self, policy: Policy, config: RunConfig, accelerator: Accelerator) -> None:
        self.policy, self._config, self._accelerator = policy, config, accelerator
        settings = config.trainer
        optimizer = torch.optim.AdamW(
            policy.master.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup(settings.warmup_steps))
        self.optimizer, self._schedule = accelerator.prepare(optimizer, schedule)

    def backward(self, batch: Batch, stop: Callable[[], bool]) -> tuple[float, Stats]:
        """Leaves the gradient of the batch's loss on the master weights; the loss and what happened.

        The loss is the objective's sum over all trained tokens of the batch divided by their number, whatever the
        micro-batches. Raises Stopped when `stop()` says so between micro-batches.
        """
        total, loss, parts = batch.trained_tokens, 0.0, []
        for part in batch.to(self._accelerator.device).micro_batches(self._config.trainer.micro_batch):
            if stop():
                self.policy.drop_gradients()
                raise Stopped
            logprobs = token_logprobs(
                self.policy.compute, part.input_ids, part.completion_mask, self._config.rollout.temperature
            )
            loss_sum, stats = objective(logprobs, part, self._config.trainer)
            self._accelerator.backward(loss_sum / total)
            self.policy.collect_gradients()
            loss += float(loss_sum.detach()) / total
            parts.append(stats)
        return loss, combine(parts)

    def step(self) -> float:
        """Clips, steps, forgets the gradient; its norm before clipping. Raises LearnError when that is not finite."""
        norm = float(self._accelerator.clip_grad_norm_(self.policy.master.parameters(), self._config.trainer.grad_clip))
        if not math.isfinite(norm):
            raise LearnError(f"the gradient's norm is {norm}: the step was not taken")
        self.optimizer.step()
        self._schedule.step()
        self.policy.drop_gradients()
        self.policy.refresh()
        return norm
