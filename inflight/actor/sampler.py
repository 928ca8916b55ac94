"""Produces a group from prompt to reward: G samples from the generators, scored, or the reason why it failed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import aiohttp

from inflight.actor.answers import Answers, SampleInProgress
from inflight.actor.called import GroupLost, all_of
from inflight.actor.calls import Question
from inflight.actor.foreign import Foreign
from inflight.actor.grading import Grade, Graded, Grader
from inflight.actor.pool import NoGenerator, Pool, Together
from inflight.arrays import Floats, Tokens
from inflight.completions import TOO_LONG, Rejected, RetryableFailure, sampling, seed_of
from inflight.config import RolloutConfig
from inflight.groups import first_name
from inflight.messages.reasons import NO_GENERATOR
from inflight.types import Rollout, RolloutGroup, StepReward, Turn


@dataclass(frozen=True)
class _Sample:
    """A complete sample, scored as far as it can be without the others."""

    answer: SampleInProgress
    finished: float
    """Unix seconds."""
    graded: Graded


class Sampler:
    """Makes groups. Its only state is counters, so that any number of groups may run at once in one event loop."""

    def __init__(
        self,
        config: RolloutConfig,
        seed: int | None,
        foreign: Foreign,
        session: aiohttp.ClientSession,
        pool: Pool,
        *,
        longest_prompt: int,
        together_from: int = 0,
        model: str = "",
        actor: str = "",
    ) -> None:
        """Without a `seed` requests have none. `longest_prompt`: most tokens of a prompt; `together_from`: from how
        many on a group has one generator (0: never); `model`: a named adapter; `actor`: whose rollouts they are."""
        self._config = config
        self._seed = seed
        self._foreign = foreign
        self.questions = foreign.questions
        """Of all the task's epochs; None where that is not known."""
        self._actor = actor
        self._longest_prompt = longest_prompt
        self._together_from = together_from
        self.grader = Grader(foreign, config.on_reward_failure)
        request = sampling(config, foreign.vocabulary, model)
        self.answers = Answers(session, pool, request, silence_s=config.token_timeout_s, decode=foreign.decode)

    async def group(self, group_id: str, index: int) -> RolloutGroup:
        """All samples of the task's question `index`, scored. Raises GroupLost or Unpatched."""
        question = await self._foreign.question(index)
        prompt_ids = await self._foreign.encode(question)
        if len(prompt_ids) > self._longest_prompt:
            allowed = f"{self._longest_prompt} at most (rollout.max_prompt_tokens, generator.max_model_len)"
            raise GroupLost(TOO_LONG, f"{question.key}: {len(prompt_ids)} tokens, {allowed}")
        size = self._config.group_size
        together = Together(worth=size) if 0 < self._together_from <= len(prompt_ids) else None
        answers = [self.answers.begin(prompt_ids, together) for _ in range(size)]
        try:
            samples = await all_of(
                [self._sample(group_id, sample, question, prompt_ids, answer) for sample, answer in enumerate(answers)]
            )
            grades = await self.grader.together(question, [each.graded for each in samples])
        except GroupLost as lost:
            lost.lengths = [answer.length for answer in answers]
            raise
        rollouts = [
            self._rollout(group_id, number, prompt_ids, sample, grade)
            for number, (sample, grade) in enumerate(zip(samples, grades, strict=True))
        ]
        return RolloutGroup(group_id=group_id, prompt_key=question.key, rollouts=rollouts)

    async def _sample(
        self, group_id: str, number: int, question: Question, prompt_ids: list[int], answer: SampleInProgress
    ) -> _Sample:
        turn = await self._turn(answer, prompt_ids, self._seed_of(f"{first_name(group_id)}/{number}"))
        finished = time.time()
        completion = await self._foreign.completion(question, turn)
        return _Sample(answer, finished, await self.grader.alone(question, prompt_ids, completion))

    async def _turn(self, answer: SampleInProgress, prompt_ids: list[int], seed: int | None) -> Turn:
        """The finished sample. Raises GroupLost or Unpatched."""
        try:
            return await self.answers.finish(answer, prompt_ids, seed)
        except RetryableFailure as error:
            raise GroupLost(error.reason, str(error), again=True) from None
        except Rejected as error:
            raise GroupLost(error.reason, str(error)) from None
        except NoGenerator as error:
            raise GroupLost(NO_GENERATOR, str(error), again=True) from None

    def _seed_of(self, rollout_id: str) -> int | None:
        """A separate sampling seed for each sample, the same in every run with the same seed."""
        return None if self._seed is None else seed_of(f"{self._seed}:{rollout_id}")

    def _rollout(self, group_id: str, number: int, prompt_ids: list[int], sample: _Sample, grade: Grade) -> Rollout:
        answer = sample.answer
        score = grade.score
        return Rollout(
            rollout_id=f"{group_id}/{number}",
            group_id=group_id,
            prompt_ids=Tokens(prompt_ids),
            turn=sample.graded.completion.turn,
            reward=score.reward,
            generator=answer.generator,
            started=answer.started,
            finished=sample.finished,
            first_token_s=answer.first_token_s,
            step_rewards=[StepReward(index, reward) for index, reward in score.step_rewards],
            teacher_logprobs=None if score.teacher_logprobs is None else Floats(score.teacher_logprobs),
            retries=dict(answer.retries),
            unscored=grade.unscored,
            score_s=grade.took_s,
            rewards=dict(score.parts),
            actor=self._actor,
            pieces=answer.pieces,
        )
