"""Asks one generator the held-out questions, under one version, and scores its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from inflight.actor.called import GroupLost, all_of
from inflight.actor.calls import Question
from inflight.actor.foreign import Foreign, ScoredAlone
from inflight.actor.scoring import Completion
from inflight.completions import TOO_LONG, Rejected, RetryableFailure, base_request, complete, endings, seed_of
from inflight.config import RunConfig, Sampling
from inflight.evaluation.answer import MIXED, Answered
from inflight.types import Turn, versions_of

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


@dataclass(frozen=True, slots=True)
class _Alone:
    """An answer with what was found of it without a look at the others of its question."""

    completion: Completion
    scored: ScoredAlone


class Asking:
    """The held-out questions of a run's task and how they are asked; serves any number of evaluations."""

    def __init__(self, config: RunConfig, foreign: Foreign, session: aiohttp.ClientSession) -> None:
        """`session` has the key that generators want."""
        self._config = config
        self._foreign = foreign
        self._session = session
        self._asked: list[_PreparedQuestion] = []
        self._room = asyncio.Semaphore(config.eval.concurrency)
        self.received = 0
        """Answers of the current evaluation that the generator has given."""
        self.done = 0
        """Answers of the current evaluation that were scored each by itself, or have failed."""

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
        with each as soon as it is scored. Raises Unpatched, or ForeignError when no process for the task's code can be
        started.
        """
        self.received = self.done = 0
        samples = self._config.eval.sampling.samples
        for index in range(len(self._asked), self.answers // samples):
            self._asked.append(await self._question(index))

        async def answers(index: int, chosen: Sequence[int]) -> list[Answered]:
            found = await all_of([self._answer(url, version, index, sample) for sample in chosen])
            scored = await self._scored(index, dict(zip(chosen, found, strict=True)))
            for each in scored:
                settled(each)
            return scored

        together = [range(samples)] if self._foreign.compares else [[sample] for sample in range(samples)]
        parts = [answers(index, chosen) for index in range(len(self._asked)) for chosen in together]
        return [each for part in await all_of(parts) for each in part]

    async def _question(self, index: int) -> _PreparedQuestion:
        try:
            question = await self._foreign.question(index, held_out=True)
            prompt_ids = await self._foreign.encode(question)
        except GroupLost as lost:
            return _PreparedQuestion(None, [], lost.reason)
        if len(prompt_ids) > self._config.longest_prompt:
            return _PreparedQuestion(question, prompt_ids, TOO_LONG)
        return _PreparedQuestion(question, prompt_ids)

    async def _answer(self, url: str, version: int, index: int, sample: int) -> _Alone | str:
        """An answer, scored without a look at the others of its question, or why there is none."""
        async with self._room:
            found = await self._alone(url, version, self._asked[index], sample)
        self.done += 1
        return found

    async def _alone(self, url: str, version: int, asked: _PreparedQuestion, sample: int) -> _Alone | str:
        if asked.question is None or asked.failed:
            return asked.failed
        try:
            turn = await self._turn(url, self._request(asked.prompt_ids, asked.question.key, sample))
            self.received += 1
            if versions_of(turn) - {version}:
                return MIXED
            completion = await self._foreign.completion(asked.question, turn)
            return _Alone(completion, await self._foreign.score(asked.question, asked.prompt_ids, completion))
        except (RetryableFailure, Rejected, GroupLost) as error:
            return error.reason

    async def _scored(self, index: int, found: Mapping[int, _Alone | str]) -> list[Answered]:
        """Samples of a question, after the rewards that look at all of them."""
        question = self._asked[index].question
        there = {sample: each for sample, each in found.items() if isinstance(each, _Alone)}
        answers = [Answered(index, sample, failed=each) for sample, each in found.items() if isinstance(each, str)]
        if question is not None and there:
            try:
                compared = await self._foreign.compare(question, [each.completion for each in there.values()])
            except GroupLost as lost:
                answers += [Answered(index, sample, failed=lost.reason) for sample in there]
            else:
                for (sample, each), values in zip(there.items(), compared, strict=True):
                    answers.append(self._answered(index, sample, question, each, values))
        return sorted(answers, key=lambda answer: answer.sample)

    def _answered(
        self, index: int, sample: int, question: Question, found: _Alone, compared: dict[str, float]
    ) -> Answered:
        try:
            score = self._foreign.total(question, found.scored, compared)
        except GroupLost as lost:
            return Answered(index, sample, failed=lost.reason)
        turn = found.completion.turn
        return Answered(index, sample, score.reward, len(turn.token_ids), turn.finish_reason == "length")

    async def _turn(self, url: str, request: dict[str, Any]) -> Turn:
        """One answer. It has no timeout of its own: the evaluation as a whole has one."""
        limit_s = self._config.eval.timeout_s
        for _ in range(ATTEMPTS - 1):
            try:
                return await complete(self._session, "the generator", url, request, limit_s)
            except RetryableFailure:
                await asyncio.sleep(PAUSE_S)
        return await complete(self._session, "the generator", url, request, limit_s)

    def _request(self, prompt_ids: list[int], key: str, sample: int) -> dict[str, Any]:
        """Its seed is the same in every evaluation, so that two of them differ by the weights alone; none where nothing
        is drawn."""
        settings = self._config.eval.sampling
        room = self._config.generator.max_model_len - len(prompt_ids)
        most = min(settings.max_tokens or self._config.rollout.max_tokens, room)
        drawn = Sampling(temperature=settings.temperature, top_p=settings.top_p)
        seed = {"seed": seed_of(f"{self._config.seed}:evaluation:{key}/{sample}")} if settings.temperature else {}
        plain = base_request(drawn, most, model=self._config.trainer.adapter) | {"prompt": prompt_ids}
        return plain | seed | endings(self._config.rollout)
