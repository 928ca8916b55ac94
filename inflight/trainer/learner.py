"""Gradient and optimizer step of one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from inflight.config import RunConfig
from inflight.named import find, with_options
from inflight.rollout.gate import GatedGroup
from inflight.sampling import Sampling
from inflight.trainer.advantage import ADVANTAGES
from inflight.trainer.batch import Batch, collate
from inflight.trainer.logprobs import Scores, score_tokens
from inflight.trainer.loss import make_loss
from inflight.trainer.policy import Policy
from inflight.trainer.stats import Stats, combine


class Stopped(Exception):
    """The step was given up half-way, before anything of the weights was changed."""


class LearnError(RuntimeError):
    """A step that must not be taken: its loss or gradient is not finite."""


def warmup(steps: int) -> Callable[[int], float]:
    """Factor of the learning rate at the n-th step (from 0): rises evenly over `steps` steps to 1 and stays."""
    return lambda step: min(1.0, (step + 1) / steps) if steps else 1.0


class Learner:
    """AdamW over a policy's master weights."""

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        accelerator: Accelerator,
        reference: PreTrainedModel | None = None,
        *,
        step: int = 0,
    ) -> None:
        """`reference` is what the divergence is measured against, where `trainer.objective` asks for the start.

        `step` steps were taken before: the schedule of the learning rate goes on from there. Raises ConfigError for an
        objective or an advantage that does not exist or refuses its options.
        """
        self.policy, self._config, self._accelerator = policy, config, accelerator
        self._reference, self._loss = reference, make_loss(config)
        self._sampling = Sampling.of(config.rollout)
        worth = config.trainer.advantage
        function = find(worth.name, ADVANTAGES, "trainer.advantage.name")
        self._advantage = with_options(function, worth.options, "trainer.advantage.options")
        settings = config.trainer
        optimizer = torch.optim.AdamW(
            policy.master.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        factor = warmup(settings.warmup_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=step - 1)
        self.optimizer, self._schedule = accelerator.prepare(optimizer, schedule)

    def collate(self, groups: Sequence[GatedGroup]) -> Batch:
        """The batch of a step, its tokens valued and weighed as the run is configured."""
        return collate(
            groups,
            advantage=self._advantage,
            normalise=self._loss.normalise,
            max_tokens=self._config.rollout.max_tokens,
        )

    def backward(self, batch: Batch, stop: Callable[[], bool]) -> tuple[float, Stats]:
        """Leaves the gradient of the batch's loss on the master weights; the loss and what happened.

        Both are the same whatever the micro-batches. Raises Stopped when `stop()` says so between micro-batches.
        """
        loss, parts = 0.0, []
        for part in batch.to(self._accelerator.device).micro_batches(self._config.trainer.micro_batch):
            if stop():
                self.policy.drop_gradients()
                raise Stopped
            scores = self._score(self.policy.compute, part, entropy_gradient=self._loss.entropy > 0)
            share, stats = self._loss(scores, part, self._reference_logprobs(part))
            self._accelerator.backward(share)
            self.policy.collect_gradients()
            loss += float(share.detach())
            parts.append(stats)
        return loss, combine(parts)

    def _score(self, model: PreTrainedModel, batch: Batch, *, entropy_gradient: bool = False) -> Scores:
        return score_tokens(model, batch, self._sampling, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """[B, L] what the divergence is measured against; None when it is not."""
        if not self._loss.kl:
            return None
        if self._config.trainer.objective.kl_reference == "teacher":
            return batch.teacher_logprobs
        return None if self._reference is None else self._score(self._reference, batch).logprobs

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
