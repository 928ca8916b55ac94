"""The actor's interface to foreign code (task and tokenizer) in child processes, so that a failure costs one group.

Questions, scores and text have separate children. Whatever goes wrong in a call becomes a GroupLost with the reason by
which it is counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from inflight.actor import calls
from inflight.actor.called import Caller, GroupLost, Traces, all_of, called
from inflight.actor.calls import Answer, Ask, ItemIs, MakeTask, MakeTokenizer, Question
from inflight.actor.crew import Crew
from inflight.actor.pending import NotMade
from inflight.actor.scoring import Completion, Rewards, rewards_of
from inflight.actor.worker_process import Bounds
from inflight.config import ConfigError, ModelConfig, RolloutConfig, RunConfig
from inflight.groups import is_usable
from inflight.models import ModelError, prepare
from inflight.prompts import Chat
from inflight.tasks.base import Score
from inflight.tasks.course import NoMoreQuestions
from inflight.types import Turn

MAX_WORKERS = 8
"""Most children for scores if their number is not configured; otherwise one per CPU core."""


@dataclass(frozen=True)
class ScoredAlone:
    """What was found of a completion without a look at the others of its question."""

    values: Mapping[str, float]
    """Of the rewards that apply, by name."""
    own: Score | None
    """The task's own score, where it counts."""


class Foreign:
    """The task and the tokenizer of a run."""

    def __init__(
        self, items: Caller, scores: Caller | None, text: Caller, limit_s: float, rewards: Rewards | None = None
    ) -> None:
        """`scores` runs the task's own score; None where the run's `rewards` take its place. `limit_s`: time limit
        of a call in seconds, for the log."""
        self._items = items
        self._scores = scores
        self._text = text
        self._limit_s = limit_s
        self._rewards = rewards
        self._traces = Traces()

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self._text.ready.size

    @property
    def questions(self) -> int | None:
        """Number of questions of all the task's epochs; None where that is not known before they are asked."""
        return self._items.ready.questions

    @property
    def held_out(self) -> int:
        """Number of questions that the task holds out for an evaluation."""
        return self._items.ready.held_out

    @property
    def compares(self) -> bool:
        """Whether a reward looks at all completions of a question together."""
        return self._rewards is not None and self._rewards.compares

    async def question(self, index: int, *, held_out: bool = False) -> Question:
        """The task's question `index`, or its held-out question `index`. Raises GroupLost, or NoMoreQuestions when
        there is no such question."""
        answer = await self._call(
            self._items, "task", f"question {index}", lambda call: calls.AskItem(call, index, held_out)
        )
        if isinstance(answer, calls.NoItem):
            raise NoMoreQuestions(answer.questions)
        assert isinstance(answer, ItemIs)
        return answer.question

    async def encode(self, question: Question) -> list[int]:
        """Token ids of a question's prompt, at least one. Raises GroupLost."""
        prompt = question.prompt
        what = "template" if isinstance(prompt, Chat) else "tokenizer"
        answer = await self._call(self._text, what, question.key, lambda call: calls.AskEncode(call, prompt))
        assert isinstance(answer, calls.TokensAre)
        if not answer.token_ids:
            raise GroupLost("task error: prompt", f"{question.key}: the prompt has no tokens")
        return answer.token_ids

    async def decode(self, token_ids: list[int], about: str = "a completion") -> str:
        """Text of tokens; `about` names them in an error. Raises GroupLost."""
        answer = await self._call(self._text, "tokenizer", about, lambda call: calls.AskDecode(call, token_ids))
        assert isinstance(answer, calls.TextIs)
        return answer.text

    async def completion(self, question: Question, turn: Turn) -> Completion:
        """A turn with its text. Raises GroupLost."""
        return Completion(turn, await self.decode(turn.token_ids.tolist(), question.key))

    async def score(self, question: Question, prompt_ids: list[int], completion: Completion) -> ScoredAlone:
        """What the task and those rewards give that look at one completion. If one fails, is late or is not a number,
        the group is lost: it is never taken as 0.

        Raises GroupLost.
        """
        rewards = self._rewards
        parts: list[Coroutine[Any, Any, Any]] = []
        if rewards is not None:
            parts.append(rewards.values(question, [completion], of_group=False))
        if rewards is None or rewards.task is not None:
            parts.append(self._task_score(question, prompt_ids, completion))
        found = await all_of(parts)
        values = {} if rewards is None else found[0][0]
        return ScoredAlone(values, found[-1] if rewards is None or rewards.task is not None else None)

    async def compare(self, question: Question, completions: Sequence[Completion]) -> list[dict[str, float]]:
        """For each of a question's completions, the values of the rewards that look at all of them, by name; each
        reward is called once. Raises GroupLost."""
        if self._rewards is None:
            return [{} for _ in completions]
        return await self._rewards.values(question, completions, of_group=True)

    def total(self, question: Question, alone: ScoredAlone, compared: Mapping[str, float]) -> Score:
        """The task's score, or the sum of the rewards. Raises GroupLost when no reward applies or the sum can't be
        trained on."""
        if self._rewards is None:
            assert alone.own is not None
            return alone.own
        return self._rewards.sum(question, {**alone.values, **compared}, alone.own)

    async def _task_score(self, question: Question, prompt_ids: list[int], completion: Completion) -> Score:
        assert self._scores is not None
        whole = (prompt_ids, completion.turn) if self._scores.ready.turns else ([], None)
        key = question.key
        answer = await self._call(
            self._scores, "reward", key, lambda call: calls.AskScore(call, question, completion.text, *whole)
        )
        assert isinstance(answer, calls.ScoreIs)
        score = Score(answer.reward, answer.step_rewards, answer.teacher_logprobs)
        if (reason := _defect(score, len(completion.turn.token_ids))) is not None:
            raise GroupLost(f"reward error: {reason}", f"{key}: {answer}"[:1000])
        return score

    async def _call(self, caller: Caller, what: str, about: str, ask: Callable[[int], Ask]) -> Answer:
        return await called(caller, what, about, ask, self._limit_s, self._traces)


def _defect(score: Score, tokens: int) -> str | None:
    """Why a score can't be used for a turn of `tokens` tokens, as a reason to count it by; None for a valid one."""
    indices = [index for index, _ in score.step_rewards]
    if indices != sorted(set(indices)) or not all(0 <= index < tokens for index in indices):
        return "step_rewards"
    if score.teacher_logprobs is not None and len(score.teacher_logprobs) != tokens:
        return "teacher_logprobs"
    numbers = [score.reward, *(reward for _, reward in score.step_rewards), *(score.teacher_logprobs or ())]
    return None if all(map(is_usable, numbers)) else "not finite"


@contextlib.asynccontextmanager
async def foreign(config: RunConfig) -> AsyncIterator[Foreign]:
    """Child processes for a run's foreign code; all of them end with the context.

    Raises ConfigError when the task or the tokenizer can't be constructed.
    """
    rollout = config.rollout
    task = config.task
    bounds = Bounds(
        limit_s=rollout.reward_timeout_s,
        start_s=rollout.task_start_timeout_s,
        memory_mib=rollout.reward_memory_mib,
        concurrency=1,
    )
    make = MakeTask(
        name=task.name,
        options=task.options,
        seed=config.seed,
        epochs=task.epochs,
        contents=task.contents,
        limit_s=bounds.limit_s,
    )
    scoring = replace(bounds, concurrency=rollout.reward_concurrency)
    workers = _workers(rollout)
    items = Crew(make, bounds, 1)
    text = Crew(_make_tokenizer(config.model), bounds, 1)
    scores = rewards = None
    if not config.rewards or any(each.is_task for each in config.rewards):
        scores = Crew(msgspec.structs.replace(make, scores_only=True), scoring, workers)
    async with contextlib.AsyncExitStack() as stack:
        for crew in (items, scores, text):  # all started before the first is awaited: each takes a while
            if crew is not None:
                stack.push_async_callback(crew.close)
                crew.start()
        if config.rewards:
            with _usable("rewards"):
                rewards = await rewards_of(config.rewards, scoring, workers, stack)
        for crew, place in (
            (items, f"task.name={task.name!r}"),
            (scores, f"task.name={task.name!r}"),
            (text, f"model.name={config.model.name!r}"),
        ):
            if crew is not None:
                with _usable(place):
                    await crew.made()
        yield Foreign(items, scores, text, bounds.limit_s, rewards)


@contextlib.contextmanager
def _usable(place: str) -> Iterator[None]:
    """Raises ConfigError where a child could not make what `place` of the configuration names."""
    try:
        yield
    except NotMade as error:
        raise ConfigError(str(error) if error.bad_input else f"{place} can't be used: {error}") from None


def _make_tokenizer(model: ModelConfig) -> MakeTokenizer:
    """Raises ConfigError when the model is not on this machine."""
    try:
        directory = prepare(model.name, revision=model.revision)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    return MakeTokenizer(model=str(directory), trust_remote_code=model.trust_remote_code)


def _workers(config: RolloutConfig) -> int:
    return config.reward_workers or max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // config.actors))
