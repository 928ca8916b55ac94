"""A group from prompt to reward: G samples from the generators, scored, or the reason why it can't be had."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import aiohttp

from inflight.actor.pool import NoGenerator, Pool
from inflight.completions import Rejected, Retry, complete, sampling
from inflight.config import RolloutConfig
from inflight.groups import LARGEST, is_usable
from inflight.tasks.base import Item, Score, Task, TurnScorer
from inflight.types import Rollout, RolloutGroup, StepReward, Turn

ATTEMPTS = 3
"""Requests for one sample before its group is given up."""

MAX_KEY = 512
"""Characters of a question's key: what a types.Name holds."""

T = TypeVar("T")


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    size: int
    """Tokens in the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens."""


class GroupLost(Exception):
    """A started group that will not come; `reason` is what it is counted by, the text is for the log."""

    def __init__(self, reason: str, detail: str, *, again: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.again = again
        """Whether the question is worth another attempt: not it, but a generator was at fault."""


class Sampler:
    """Makes groups. Holds no state but counters, so that any number of groups may be under way in one event loop."""

    def __init__(
        self, config: RolloutConfig, seed: int, task: Task, tokens: Tokens, session: aiohttp.ClientSession, pool: Pool
    ) -> None:
        self._config = config
        self._seed = seed
        self._task = task
        self._tokens = tokens
        self._session = session
        self._pool = pool
        self._sampling = sampling(config, tokens.size)
        self.aborted = 0
        """Requests that an engine gave up; they were asked again."""
        self.retries = 0
        """Attempts that failed and were repeated, aborted ones included."""
        self.tokens_out = 0
        """Tokens received in whole samples."""

    async def group(self, group_id: str, index: int) -> RolloutGroup:
        """All samples of the task's index-th question, scored. Raises GroupLost or Unpatched."""
        limit = self._config.reward_timeout_s
        try:
            async with asyncio.timeout(limit) as scope:
                item = await asyncio.to_thread(self._task.item, index)  # a generated puzzle may take its time
        except Exception as error:  # a task is foreign code
            if scope.expired():
                raise GroupLost("task timeout", f"question {index}: not told within {limit:.0f} s") from None
            raise GroupLost(f"task error: {type(error).__name__}", str(error)) from error
        if not isinstance(item.key, str) or not 1 <= len(item.key) <= MAX_KEY:  # the buffer could not read such a group
            raise GroupLost("task error: key", f"question {index}: a key is text of 1 to {MAX_KEY} characters")
        prompt_ids = self._tokens.encode(item.prompt)
        rollouts = await _all(
            [self._rollout(group_id, sample, item, prompt_ids) for sample in range(self._config.group_size)]
        )
        return RolloutGroup(group_id=group_id, prompt_key=item.key, rollouts=rollouts)

    async def _rollout(self, group_id: str, sample: int, item: Item, prompt_ids: list[int]) -> Rollout:
        rollout_id = f"{group_id}/{sample}"
        retries = Counter[str]()
        turn, generator, started = await self._turn(prompt_ids, self._seed_of(rollout_id), retries)
        finished = time.time()
        self.tokens_out += len(turn.token_ids)
        score = await self._score(item, prompt_ids, turn)
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

    async def _score(self, item: Item, prompt_ids: list[int], turn: Turn) -> Score:
        """The task's score. One that fails, is late or is no number loses the group: it is never taken for 0."""
        limit, completion = self._config.reward_timeout_s, self._tokens.decode(turn.token_ids)
        try:
            async with asyncio.timeout(limit) as scope:
                if isinstance(self._task, TurnScorer):
                    score = await self._task.score_turn(item, prompt_ids, turn, completion)
                else:
                    score = Score(float(await self._task.score(item, completion)))
        except Exception as error:  # a task is foreign code
            if scope.expired():
                raise GroupLost("reward timeout", f"{item.key}: no score within {limit:.0f} s") from None
            raise GroupLost(f"reward error: {type(error).__name__}", f"{item.key}: {error}") from error
        numbers = [score.reward, *(reward for _, reward in score.step_rewards), *(score.teacher_logprobs or ())]
        if not all(map(is_usable, numbers)):
            raise GroupLost(
                "reward error: not finite", f"{item.key}: {score.reward} or a part of it (at most {LARGEST:g})"
            )
        return score

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
