"""A trainer and a reward that take their time, by the names that a run's configuration gives them (not a test file)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from inflight.tasks.addition import Addition
from inflight.trainer.objectives.base import Terms, TokenLoss
from inflight.trainer.objectives.ppo import ppo

STEP_S = 0.6
SCORE_S = 0.6


def objective(terms: Terms) -> TokenLoss:
    """PPO, late."""
    time.sleep(STEP_S)
    return ppo(terms)


@dataclass(frozen=True)
class Slow(Addition):
    """Additions whose answers are hard to judge."""

    async def score(self, item, completion):
        await asyncio.sleep(SCORE_S)
        return await super().score(item, completion)
