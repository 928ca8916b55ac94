"""A group from prompt to reward: G samples from the generators, scored, or the reason why it can't be had."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from hashlib import blake2b
from typing import Any, TypeVar

import aiohttp

from inflight.actor.calls import Question
from inflight.actor.foreign import Foreign, GroupLost
from inflight.actor.pool import NoGenerator, Pool
from inflight.completions import Rejected, Retry, complete, sampling
from inflight.config import RolloutConfig
from inflight.groups import first_name
from inflight.types import Rollout, RolloutGroup, StepReward, Turn

ATTEMPTS = 3
"""Requests for one sample before its group is given up."""

T = TypeVar("T")


class Sampler:
    """Makes groups. Holds no state but counters, so that any number of groups may be under way in one event loop."""

    def __init__(
        self, config: RolloutConfig, seed: int, foreign: Foreign, session: aiohttp.ClientSession, pool: Pool
    ) -> None:
        self._config = config
        self._seed = seed
        self._foreign = foreign
        self._session = session
        self._pool = pool
        self._sampling = sampling(config, foreign.vocabulary)
        self.aborted = 0
        """Requests that an engine gave up; they were asked again."""
        self.retries = 0
        """Attempts that failed and were repeated, aborted ones included."""
        self.tokens_out = 0
        """Tokens received in whole samples."""

    async def group(self, group_id: str, index: int) -> RolloutGroup:
        """All samples of the task's index-th question, scored. Raises GroupLost or Unpatched."""
        question = await self._foreign.question(index)
        prompt_ids = await self._foreign.encode(question)
        rollouts = await _all(
            [self._rollout(group_id, sample, question, prompt_ids) for sample in range(self._config.group_size)]
        )
        return RolloutGroup(group_id=group_id, prompt_key=question.key, rollouts=rollouts)

    async def _rollout(self, group_id: str, sample: int, question: Question, prompt_ids: list[int]) -> Rollout:
        rollout_id, drawn_as = f"{group_id}/{sample}", f"{first_name(group_id)}/{sample}"
        retries = Counter[str]()
        turn, generator, started = await self._turn(prompt_ids, self._seed_of(drawn_as), retries)
        finished = time.time()
        self.tokens_out += len(turn.token_ids)
        score = await self._foreign.score(question, prompt_ids, turn)
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            prompt_ids=prompt_ids,
            turn=turn,
            reward=score.reward,
            generator=generator,
            started=started,
            finished=finished,
            first_token_s=0.0,
            step_rewards=[StepReward(index, reward) for index, reward in score.step_rewards],
            teacher_logprobs=None if score.teacher_logprobs is None else list(score.teacher_logprobs),
            retries=dict(retries),
        )

    async def _turn(self, prompt_ids: list[int], seed: int, retries: Counter[str]) -> tuple[Turn, str, float]:
        """A turn, the name of the generator that gave it and when it was asked (Unix seconds).

        Attempts that came to nothing are counted in `retries`, by reason.
        """
        request = self._sampling | {"prompt": prompt_ids, "seed": seed}
        limit = self._config.request_timeout_s
        failed_at: list[str] = []
        last = Retry("not tried")
        for _ in range(ATTEMPTS):
            try:
                async with self._pool.lease(failed_at, limit) as generator:
                    started = time.time()
                    turn = await complete(self._session, generator.name, generator.url, request, limit)
            except Retry as error:
                last = error
                retries[error.reason] += 1
                self.retries += 1
                self.aborted += error.reason == "aborted"
                failed_at.append(generator.name)
                if error.down:
                    self._pool.mark_down(generator)
            except Rejected as error:
                raise GroupLost(error.reason, str(error)) from None
            except NoGenerator as error:
                raise GroupLost("no generator", str(error), again=True) from None
            else:
                if turn.token_versions:
                    generator.version = max(generator.version, turn.token_versions[-1].version)
                return turn, generator.name, started
        raise GroupLost(last.reason, str(last), again=True)

    def _seed_of(self, rollout_id: str) -> int:
        """A sampling seed of its own for each sample, the same in a run with the same seed."""
        return int.from_bytes(blake2b(f"{self._seed}:{rollout_id}".encode(), digest_size=8).digest()) >> 1


async def _all(parts: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the rest, waits for them and is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
