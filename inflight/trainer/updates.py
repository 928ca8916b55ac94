"""All updates on one batch: its mini-batches, for one or several epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from inflight.trainer.batch import Batch
from inflight.trainer.learner import Learner
from inflight.trainer.stats import Stats


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One optimizer step, or its gradient alone if that was not finite and the weights did not change."""

    loss: float
    grad_norm: float
    """Before clipping."""
    stats: Stats

    @property
    def taken(self) -> bool:
        """Whether the weights have changed."""
        return math.isfinite(self.grad_norm)


def train(learner: Learner, batch: Batch, stop: Callable[[], bool]) -> list[Update]:
    """Takes the batch's updates, `trainer.updates_per_batch` of them per epoch, and returns them in order.

    Raises Stopped when `stop()` returns True before the first update; afterwards all updates are taken, because a
    version is the result of a whole batch. An update with a non-finite gradient is skipped, the others are taken.
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
