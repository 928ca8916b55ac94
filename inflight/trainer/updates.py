"""All updates that a batch is trained on for: its mini-batches, once or several times over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from inflight.trainer.batch import Batch
from inflight.trainer.learner import Learner
from inflight.trainer.stats import Stats


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One optimizer step, or its gradient alone where that was not finite: then nothing has changed."""

    loss: float
    grad_norm: float
    """Before clipping."""
    stats: Stats

    @property
    def taken(self) -> bool:
        """Whether the weights have moved."""
        return math.isfinite(self.grad_norm)


def train(learner: Learner, batch: Batch, stop: Callable[[], bool]) -> list[Update]:
    """Takes the batch's updates and tells of each, in their order; `trainer.updates_per_batch` of them an epoch.

    Raises Stopped when `stop()` says so before the first update; afterwards the batch is trained on to its end, because
    a version is a whole one. One whose gradient is not finite is skipped, the others are taken.
    """
    settings = learner.settings
    if settings.updates == 1:
        return [_update(learner, batch, stop, last=True)]
    batch = learner.scored(batch, stop)
    done: list[Update] = []
    for epoch in range(settings.epochs_per_batch):
        parts = learner.mini_batches(batch)
        for index, part in enumerate(parts):
            last = epoch + 1 == settings.epochs_per_batch and index + 1 == len(parts)
            done.append(_update(learner, part, (lambda: False) if done else stop, last=last))
    return done


def _update(learner: Learner, part: Batch, stop: Callable[[], bool], *, last: bool) -> Update:
    loss, stats = learner.backward(part, stop)
    return Update(loss, learner.step(last=last), stats)
