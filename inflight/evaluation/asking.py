"""Asks one generator the held-out questions, under one version, and scores its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import aiohttp

from inflight.actor.called import all_of
from inflight.actor.calls import Question
from inflight.actor.foreign import Foreign, GroupLost
from inflight.completions import TOO_LONG, Rejected, RetryableFailure, complete, endings
from inflight.config import RunConfig
from inflight.evaluation.answer import MIXED, Answered, versions_of
from inflight.types import Turn

ATTEMPTS = 3
"""Requests for one answer."""
PAUSE_S = 0.5
"""Between two of them."""


@dataclass(frozen=True, slots=True)
class _PreparedQuestion:
    """A held-out question, ready to be sent, or why it can't be."""

    question: Question | None
    prompt_ids: list[int]
    failed: str = ""


class Asking:
    """The held-out questions of a run's task and how they are asked; serves any number of evaluations."""

    def __init__(self, config: RunConfig, foreign: Foreign, session: aiohttp.ClientSession) -> None:
        """`session` has the key that generators want."""
        self._config = config
        self._foreign = foreign
        self._session = session
        self._asked: list[_PreparedQuestion] = []
        self._room = asyncio.Semaphore(config.eval.concurrency)
        self.done = 0
        """Answers of the current evaluation that have arrived or failed."""

    @property
    def answers(self) -> int:
        """Of one evaluation."""
        held = self._foreign.held_out
        wanted = self._config.eval.questions
        return (min(held, wanted) if wanted else held) * self._config.eval.sampling.samples

    async def ask(
        self, url: str, version: int, *, settled: Callable[[Answered], None] = lambda answer: None
    ) -> list[Answered]:
        """All answers of the generator at `url`, which stamps `version`, scored, in the order of the questions.

        One that is not wholly computed under `version`, or that fails, is given with its reason. `settled` is called
        with each at once. Raises Unpatched, or ForeignError when no process for the task's code can be started.
        """
        self.done = 0
        samples = self._config.eval.sampling.samples
        for index in range(len(self._asked), self.answers // samples):
            self._asked.append(await self._question(index))

        async def one(index: int, sample: int) -> Answered:
            async with self._room:
                answered = await self._answer(url, version, index, sample)
            self.done += 1
            settled(answered)
            return answered

        return await all_of([one(index, sample) for index in range(len(self._asked)) for sample in range(samples)])

    async def _question(self, index: int) -> _PreparedQuestion:
        try:
            question = await self._foreign.question(index, held_out=True)
            prompt_ids = await self._foreign.encode(question)
        except GroupLost as lost:
            return _PreparedQuestion(None, [], lost.reason)
        if len(prompt_ids) > self._config.longest_prompt:
            return _PreparedQuestion(question, prompt_ids, TOO_LONG)
        return _PreparedQuestion(question, prompt_ids)

    async def _answer(self, url: str, version: int, index: int, sample: int) -> Answered:
        asked = self._asked[index]
        if asked.question is None or asked.failed:
            return Answered(index, sample, failed=asked.failed)
        try:
            turn = await self._turn(url, self._request(asked.prompt_ids, asked.question.key, sample))
            if versions_of(turn) - {version}:
                return Answered(index, sample, failed=MIXED)
            score = await self._foreign.score(asked.question, asked.prompt_ids, turn)
        except (RetryableFailure, Rejected, GroupLost) as error:
            return Answered(index, sample, failed=error.reason)
        return Answered(index, sample, score.reward, len(turn.token_ids), turn.finish_reason == "length")

    async def _turn(self, url: str, request: dict[str, Any]) -> Turn:
        """One answer. It has no timeout of its own: the evaluation as a whole has one."""
        for attempt in range(ATTEMPTS):
            try:
                return await complete(self._session, "the generator", url, request, self._config.eval.timeout_s)
            except RetryableFailure:
                if attempt + 1 == ATTEMPTS:
                    raise
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("unreachable")

    def _request(self, prompt_ids: list[int], key: str, sample: int) -> dict[str, Any]:
        """Every knob is set, so that no default of the server creeps in; a seed only where something is drawn."""
        settings = self._config.eval.sampling
        room = self._config.generator.max_model_len - len(prompt_ids)
        return {
            "n": 1,
            "stream": False,
            "prompt": prompt_ids,
            "max_tokens": min(settings.max_tokens or self._config.rollout.max_tokens, room),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_packed_logprobs": True,
            **({"seed": self._seed_of(key, sample)} if settings.temperature else {}),
            **({"model": adapter} if (adapter := self._config.trainer.adapter) else {}),
            **endings(self._config.rollout),
        }

    def _seed_of(self, key: str, sample: int) -> int:
        """The same in every evaluation, so that two of them differ by the weights alone."""
        text = f"{self._config.seed}:evaluation:{key}/{sample}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
