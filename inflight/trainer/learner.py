"""Gradient and optimizer step of one batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from inflight.config import RunConfig, Sampling, TrainerConfig
from inflight.rollout.gate import GatedGroup
from inflight.trainer.adapter import AdapterPolicy
from inflight.trainer.advantage import advantage_of
from inflight.trainer.batch import Batch, collate
from inflight.trainer.coordinator import Coordinator
from inflight.trainer.logprob_mismatch import LogprobMismatch
from inflight.trainer.logprobs import Scores
from inflight.trainer.loss import make_loss
from inflight.trainer.optimizer import make_optimizer, make_schedule
from inflight.trainer.policy import Policy
from inflight.trainer.split import mini_batches, rounds, shares
from inflight.trainer.stats import Stats, combine
from inflight.trainer.wire import from_wire, tensor_from_wire
from inflight.weights.shards import is_sharded


class Stopped(Exception):
    """The step was cancelled half way, before the weights changed."""


class Learner:
    """AdamW over a policy's master weights."""

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        accelerator: Accelerator,
        reference: Policy | None = None,
        coordinator: Coordinator | None = None,
        *,
        step: int = 0,
    ) -> None:
        """`reference`: the model from which the KL divergence is measured, if `trainer.objective` uses the start model.

        `coordinator` is rank 0's; None for a single rank and on the other ranks. `step`: number of steps taken before,
        from which the learning-rate schedule continues. Raises ConfigError for an objective or an advantage that does
        not exist or rejects its options.
        """
        self.mismatch: LogprobMismatch | None = None
        """If set, gets every scored micro-batch."""
        self.policy = policy
        self._config = config
        self._accelerator = accelerator
        self.coordinator = coordinator or Coordinator(None, config)
        self._reference = reference
        self._loss = make_loss(config)
        self._sampling = Sampling.of(config.rollout)
        self._advantage = advantage_of(config.trainer.advantage)
        optimizer = make_optimizer(policy.master, config.trainer)
        schedule = make_schedule(optimizer, config.trainer, step)
        self.optimizer, self._schedule = accelerator.prepare(optimizer, schedule)
        self._moved = False
        """Whether an update of the batch was taken so far."""

    @property
    def settings(self) -> TrainerConfig:
        """The trainer's options."""
        return self._config.trainer

    @property
    def learning_rate(self) -> float:
        """Of the step that is next."""
        return float(self.optimizer.param_groups[0]["lr"])

    def collate(self, groups: Sequence[GatedGroup]) -> Batch:
        """The batch of a step, with advantages and token weights as configured."""
        return collate(
            groups,
            advantage=self._advantage,
            normalise=self._loss.normalise,
            max_tokens=self._config.rollout.max_tokens,
        )

    def mini_batches(self, batch: Batch) -> list[Batch]:
        """The parts of one epoch, a new random partition at each call."""
        return mini_batches(
            batch, self.settings.updates_per_batch, self._loss.normalise, self._config.rollout.max_tokens
        )

    def scored(self, batch: Batch, stop: Callable[[], bool]) -> Batch:
        """The batch with `proximal_logprobs`: its tokens' log-probabilities under the current weights.

        Computed in the micro-batches of a step. Raises Stopped as `backward` does.
        """
        found: list[torch.Tensor] = []
        for own, *others in self._rounds(batch):
            if stop():
                raise Stopped
            with self.coordinator.learning(others, purpose="score"):
                found.append(self.score(own))
            found += [tensor_from_wire("logprobs", each) for each in self.coordinator.scored()]
        filled = torch.zeros_like(batch.behaviour_logprobs)
        cut = shares(batch, **self._cut)
        for rows, logprobs in zip(cut, found, strict=False):  # beyond are ranks that had nothing left
            filled[rows, : logprobs.shape[1]] = logprobs
        return dataclasses.replace(batch, proximal_logprobs=filled)

    @torch.no_grad()
    def score(self, batch: Batch) -> torch.Tensor:
        """[B, L] float32 on the CPU: log-probabilities of a micro-batch's tokens under the current weights."""
        scores = self._score(self.policy.score, batch.to(self._accelerator.device))
        self.policy.reshard()
        return scores.logprobs.cpu()

    def backward(self, batch: Batch, stop: Callable[[], bool]) -> tuple[float, Stats]:
        """Leaves the gradient of the batch's loss on the master weights; returns the loss and the step's figures.

        Both are independent of the split into micro-batches and ranks. Raises Stopped when `stop()` returns True
        between micro-batches.
        """
        done: list[tuple[float, Stats]] = []
        for own, *others in self._rounds(batch):
            if stop():
                with self.coordinator.together("drop"):
                    self.policy.drop_gradients()
                raise Stopped
            with self.coordinator.learning(others):
                done.append(self.learn(own))
        done += [(each.loss, from_wire(Stats, each.stats)) for each in self.coordinator.learned()]
        return sum(loss for loss, _ in done), combine([stats for _, stats in done])

    def _rounds(self, batch: Batch) -> list[list[Batch]]:
        return rounds(batch, **self._cut)

    @property
    def _cut(self) -> dict[str, Any]:
        """How `split` is to cut a batch."""
        by = self.settings
        return {"size": by.micro_batch, "ranks": by.processes, "mixed": by.packing, "tokens": by.micro_batch_tokens}

    def learn(self, batch: Batch) -> tuple[float, Stats]:
        """Adds the gradient of a micro-batch; returns its share of the step's loss, and its figures."""
        part = batch.to(self._accelerator.device)
        scores = self._score(self.policy.score, part, entropy_gradient=self._loss.entropy > 0)
        if self.mismatch is not None:
            self.mismatch.add(scores.logprobs, part)
        share, stats = self._loss(scores, part, self._reference_logprobs(part))
        # FSDP2 averages the ranks' gradients, but each rank has a part of one sum.
        self._accelerator.backward(share * self.settings.processes)
        self.policy.collect_gradients()
        return float(share.detach()), stats

    @torch.no_grad()
    def logprobs(self, batch: Batch, sampling: Sampling) -> torch.Tensor:
        """[B, L] float32 on the CPU: log-probabilities of the completions under `sampling`, 0 elsewhere.

        Called by rank 0; the other ranks take part with a sequence of their own, so that collectives inside match.
        """
        with self.coordinator.together("compare"):
            part = batch.to(self._accelerator.device)
            scores = self.policy.score(part, sampling, packing=self.settings.packing)
            self.policy.reshard()
        return scores.logprobs.cpu()

    def _score(self, score: Callable[..., Scores], batch: Batch, *, entropy_gradient: bool = False) -> Scores:
        packing = self.settings.packing
        return score(batch, self._sampling, entropy_gradient=entropy_gradient, packing=packing)

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """[B, L] log-probabilities of the reference for the KL divergence; None without one."""
        if not self._loss.kl:
            return None
        if self.settings.objective.kl_reference == "teacher":
            return batch.teacher_logprobs
        if isinstance(self.policy, AdapterPolicy):
            return self._score(self.policy.score_base, batch).logprobs
        if self._reference is None:
            return None
        scores = self._score(self._reference.score, batch)
        self._reference.reshard()
        return scores.logprobs

    def step(self, *, last: bool = True) -> float:
        """Clips, steps and clears the gradient; returns its norm before clipping. No step is taken if that is not
        finite.

        The norm is over all shards, so that all ranks take the step or none does. The learning rate advances with the
        `last` update of a batch, as the version does, if any update of the batch was taken.
        """
        with self.coordinator.together("step" if last else "update"):
            norm = self._clip()
            if math.isfinite(norm):
                self.optimizer.step()
                self._moved = True
        if last and self._moved:
            self._schedule.step()
            self._moved = False
        self.policy.drop_gradients()
        self.policy.refresh()
        return norm

    def _clip(self) -> float:
        """The norm over all shards; each rank scales its own shards by it."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.master.parameters(), self.settings.grad_clip)
        return float(norm.full_tensor() if is_sharded(norm) else norm)  # type: ignore[attr-defined]
