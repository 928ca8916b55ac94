"""The object that a child process serves: a task, rewards or a tokenizer; each call is checked on its way in and out.

Runs in the child. Results of foreign code are checked here, so that only well-formed messages are sent to the actor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from inflight.actor.calls import (
    Answer,
    Ask,
    AskDecode,
    AskEncode,
    AskItem,
    AskReward,
    AskScore,
    Constructed,
    ItemIs,
    Make,
    MakeRewards,
    MakeTask,
    NoItem,
    Question,
    RewardsAre,
    ScoreIs,
    TextIs,
    TokensAre,
)
from inflight.config import TaskConfig
from inflight.prompts import Chat, ModelTokens
from inflight.rewards import Reward, RewardError, Samples, make_all
from inflight.rewards.base import is_number
from inflight.tasks import make
from inflight.tasks.base import HeldOut, Item, Score, Task, TurnScorer, columns_of, plain_score, turn_score
from inflight.tasks.column_values import from_wire, to_wire
from inflight.tasks.course import Course, NoMoreQuestions
from inflight.tasks.examine import require_same

MAX_KEY = 512
"""Most characters of a question's key: those of a types.Name."""


class UnusableResult(Exception):
    """Foreign code returned something unusable; it is counted by `kind`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Service(Protocol):
    """Foreign code behind calls."""

    files: frozenset[str]
    """In which it is the user's own, as far as that is known: an error there is counted by its line."""

    def ready(self) -> Constructed:
        """What the actor needs to know about it."""

    async def answer(self, ask: Ask) -> Answer:
        """Carries out a call. Raises UnusableResult, or whatever the foreign code raises."""


def service_of(message: Make) -> Service:
    """Constructs the task, rewards or tokenizer. Raises ConfigError, or whatever the foreign code raises."""
    if isinstance(message, MakeTask):
        task = make(TaskConfig(message.name, message.options), message.seed)
        if message.scores_only:
            return TaskService(task, None)
        require_same(task, message.contents)
        return TaskService(task, Course(task, message.epochs))
    if isinstance(message, MakeRewards):
        return RewardsService(make_all(message.rewards))
    return TextService(ModelTokens(message.model, trust_remote_code=message.trust_remote_code))


class RewardsService:
    """The rewards of a run, or some of them."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = rewards
        self.files = frozenset().union(*(each.files for each in rewards))

    def ready(self) -> Constructed:
        """Which of them are asynchronous; when all are, many calls may be under way at once."""
        waits = [each.asynchronous for each in self._rewards]
        return Constructed(concurrent=all(waits), asynchronous=waits)

    async def answer(self, ask: Ask) -> Answer:
        """Of AskReward."""
        if not isinstance(ask, AskReward) or ask.which >= len(self._rewards):
            raise UnusableResult("call", f"{len(self._rewards)} rewards take no {type(ask).__name__}")
        question = ask.question
        prompt = question.prompt
        samples = Samples(
            completions=ask.completions,
            completion_ids=ask.completion_ids,
            prompt=prompt.messages if isinstance(prompt, Chat) else prompt,
            finish_reasons=ask.finish_reasons,
            columns=columns_of(_item(question)),
        )
        try:
            return RewardsAre(ask.call, await self._rewards[ask.which].values(samples))
        except RewardError as error:
            raise UnusableResult(error.kind, str(error)) from None


class TaskService:
    """A task's questions and scores; without a course, scores alone."""

    def __init__(self, task: Task, course: Course | None) -> None:
        self.files = frozenset[str]()
        self._task = task
        self._course = course

    def ready(self) -> Constructed:
        """Whether its score is asynchronous, and needs turns; how many questions it has, and how many it holds out."""
        turns = isinstance(self._task, TurnScorer)
        score = self._task.score_turn if isinstance(self._task, TurnScorer) else getattr(self._task, "score", None)
        concurrent = inspect.iscoroutinefunction(score)
        if self._course is None:
            return Constructed(concurrent=concurrent, turns=turns)
        asked = self._course.questions
        held_out = self._held_out_size()
        return Constructed(concurrent=concurrent, turns=turns, questions=asked, held_out=held_out)

    async def answer(self, ask: Ask) -> Answer:
        """Handles AskItem and AskScore."""
        if isinstance(ask, AskItem):
            try:
                item = self._held_out(ask.index) if ask.held_out else self._item(ask.index)
                return ItemIs(ask.call, _question(item))
            except NoMoreQuestions as end:
                return NoItem(ask.call, end.questions)
        if isinstance(ask, AskScore):
            return _score(ask.call, await self._score(ask))
        raise UnusableResult("call", f"a task takes no {type(ask).__name__}")

    def _item(self, index: int) -> Any:
        if self._course is None:
            raise UnusableResult("call", "this child was made for scores only")
        try:
            return self._course.item(index)
        except StopIteration as error:  # a coroutine would turn it into a RuntimeError
            raise UnusableResult("StopIteration", str(error)) from None

    def _held_out_size(self) -> int:
        return self._task.held_out_size() if isinstance(self._task, HeldOut) else 0

    def _held_out(self, index: int) -> Any:
        if index >= self._held_out_size():
            raise NoMoreQuestions(self._held_out_size())
        assert isinstance(self._task, HeldOut)
        return self._task.held_out_item(index)

    async def _score(self, ask: AskScore) -> Any:
        question = ask.question
        item = _item(question)
        if ask.turn is None or not isinstance(self._task, TurnScorer):
            return Score(_number(await plain_score(self._task, item, ask.completion)))
        return await turn_score(self._task, item, ask.prompt_ids, ask.turn, ask.completion)


class TokenizerMethods(Protocol):
    """The methods that are needed of a tokenizer."""

    size: int
    """Vocabulary size."""

    def encode(self, prompt: str | Chat) -> Iterable[Any]:
        """Token ids of a prompt."""

    def decode(self, token_ids: list[int]) -> Any:
        """Text of a completion, without special tokens."""


class TextService:
    """A tokenizer's encoding and decoding."""

    def __init__(self, tokens: TokenizerMethods) -> None:
        self.files = frozenset[str]()
        self._tokens = tokens

    def ready(self) -> Constructed:
        """The size of the vocabulary."""
        return Constructed(size=self._tokens.size)

    async def answer(self, ask: Ask) -> Answer:
        """Handles AskEncode and AskDecode."""
        if isinstance(ask, AskEncode):
            ids = ask.prompt if isinstance(ask.prompt, list) else self._tokens.encode(ask.prompt)
            return TokensAre(ask.call, _token_ids(ids))
        if isinstance(ask, AskDecode):
            text = self._tokens.decode(ask.token_ids)
            if not isinstance(text, str):
                raise UnusableResult("text", f"a completion's text is text, not {type(text).__name__}")
            return TextIs(ask.call, text)
        raise UnusableResult("call", f"a tokenizer takes no {type(ask).__name__}")


def _question(item: Any) -> Question:
    """An item as a message. Raises UnusableResult for an object that is no item."""
    for name in ("key", "prompt", "answer"):
        if not hasattr(item, name):
            raise UnusableResult("item", f"an item has key, prompt and answer, {type(item).__name__} has no {name}")
    if not isinstance(item.key, str) or not 1 <= len(item.key) <= MAX_KEY:  # the buffer could not decode such a group
        raise UnusableResult("key", f"a key is text of 1 to {MAX_KEY} characters")
    columns = to_wire(dict(getattr(item, "columns", {})))
    return Question(item.key, _prompt(item.prompt), to_wire({"answer": item.answer})["answer"], columns)


def _item(question: Question) -> Item:
    """The item that a message was made of."""
    answer = from_wire({"answer": question.answer})["answer"]
    return Item(question.key, question.prompt, answer, from_wire(question.columns))


def _prompt(prompt: Any) -> str | list[int] | Chat:
    """A prompt as a message. Raises UnusableResult for an object that is no prompt."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Chat):
        if not isinstance(prompt.messages, list) or not all(isinstance(each, dict) for each in prompt.messages):
            raise UnusableResult("prompt", "the messages of a chat are a list of dicts")
        return prompt
    if isinstance(prompt, Iterable) and not isinstance(prompt, bytes | dict):
        return [_index(each) for each in prompt]
    raise UnusableResult("prompt", f"a prompt is text, token ids or a Chat, not {type(prompt).__name__}")


def _score(call: int, score: Any) -> ScoreIs:
    """A score as a message, in plain numbers. Raises UnusableResult for anything else."""
    if not isinstance(score, Score):
        raise UnusableResult("score", f"score_turn gives a Score, not {type(score).__name__}")
    steps = [(_index(index), _number(reward)) for index, reward in score.step_rewards]
    teacher = score.teacher_logprobs
    return ScoreIs(call, _number(score.reward), steps, None if teacher is None else [_number(each) for each in teacher])


def _number(value: Any) -> float:
    """Converts any kind of number, including numpy's and torch's. Raises UnusableResult for text, None and others."""
    if not is_number(value):
        raise UnusableResult("no number", f"a score is a number, not {type(value).__name__}")
    return float(value)


def _index(value: Any) -> int:
    if not hasattr(type(value), "__index__"):
        raise UnusableResult("no number", f"a token's id or index is a whole number, not {type(value).__name__}")
    return int(value)


def _token_ids(values: Iterable[Any]) -> list[int]:
    """Ids of a prompt. Raises UnusableResult; ids beyond the vocabulary are refused by the generator."""
    ids = [_index(value) for value in values]
    if any(each < 0 for each in ids):
        raise UnusableResult("token ids", "a token's id is 0 or more")
    return ids
