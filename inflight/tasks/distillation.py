"""Adds a teacher to any task: a model that scores each token of a completion with its log-probability."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import msgspec

from inflight.config import ConfigError, TaskConfig
from inflight.error_line import one_line, with_kind
from inflight.http_body import bounded_body
from inflight.models import ModelError, prepare
from inflight.tasks.base import Item, Score, Task, TurnScorer, plain_score, turn_score
from inflight.types import Turn

MAX_ANSWER_BYTES = 64 << 20


class TeacherError(RuntimeError):
    """The teacher gave no usable answer: the group is lost, under `reward error: TeacherError`."""


@dataclass(frozen=True)
class Distillation:
    """Questions and rewards of `task`; a teacher scores the same tokens (`Rollout.teacher_logprobs`).

    The trainer uses them as a reward per token with `trainer.advantage.name=distillation`, or as a term of the loss
    with `trainer.objective.kl_reference=teacher`. The teacher must have the student's tokens. Its distribution is taken
    at temperature 1, without truncation.

    Example: `task: {name: distillation, options: {teacher: "http://127.0.0.1:9000", task: progression}}`.
    """

    seed: int
    teacher: str
    """Base address of a vLLM server (`http…`), or a model: a name or a directory (models/). Each of the actor's
    scoring processes loads one; `rollout.reward_workers=1` limits them to one."""
    task: str
    """The task that provides the questions."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its options."""
    model: str = ""
    """The teacher's name at the server; empty: the model that it serves."""
    _inner: Task = field(init=False, repr=False, compare=False)
    _local: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        make = importlib.import_module("inflight.tasks").make  # imports this module, so it can't be imported above
        object.__setattr__(self, "_inner", make(TaskConfig(self.task, dict(self.options)), self.seed))
        object.__setattr__(self, "_local", None if self.teacher.startswith("http") else _Local(self.teacher))

    def item(self, index: int) -> Item:
        """The inner task's question."""
        return self._inner.item(index)

    async def score(self, item: Item, completion: str) -> float:
        """The inner task's score."""
        return float(await plain_score(self._inner, item, completion))

    async def score_turn(self, item: Item, prompt_ids: Sequence[int], turn: Turn, completion: str) -> Score:
        """The inner task's score and the teacher's log-probabilities, computed concurrently. Raises TeacherError or
        what the task raises."""
        if isinstance(self._inner, TurnScorer):
            inner = turn_score(self._inner, item, prompt_ids, turn, completion)
        else:
            inner = self._plain(item, completion)
        score, logprobs = await asyncio.gather(inner, self._ask([*prompt_ids, *turn.token_ids], len(prompt_ids)))
        return Score(score.reward, score.step_rewards, logprobs)

    async def _plain(self, item: Item, completion: str) -> Score:
        return Score(await self.score(item, completion))

    async def _ask(self, ids: list[int], start: int) -> list[float]:
        if self._local is not None:
            return await asyncio.to_thread(self._local.logprobs, ids, start)
        body = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        request = body | ({"model": self.model} if self.model else {})
        too_large = TeacherError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{self.teacher.rstrip('/')}/v1/completions", json=request) as answer,
            ):
                text = await bounded_body(answer, MAX_ANSWER_BYTES, too_large)
                if answer.status != 200:
                    raise TeacherError(f"{self.teacher}: http {answer.status}: {text[:200]!r}")
        except (aiohttp.ClientError, OSError) as error:
            raise TeacherError(f"{self.teacher}: {with_kind(error)}") from None
        return _parse(text, ids, start)


class _Logprob(msgspec.Struct):
    logprob: float


class _TeacherChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None]


class _TeacherBody(msgspec.Struct):
    choices: list[_TeacherChoice]


def _parse(body: bytes, ids: list[int], start: int) -> list[float]:
    """[T] log-probabilities of `ids[start:]` from an answer with prompt_logprobs. Raises TeacherError."""
    try:
        given = msgspec.json.decode(body, type=_TeacherBody).choices[0].prompt_logprobs
        return [cast(dict[str, _Logprob], given[at])[str(ids[at])].logprob for at in range(start, len(ids))]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, KeyError, TypeError) as error:
        raise TeacherError(f"no prompt_logprobs for the tokens: {with_kind(error)}") from None


class _Local:
    """A teacher in this process; one request at a time."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError when there is no such model."""
        from transformers import AutoModelForCausalLM

        try:
            self._model = AutoModelForCausalLM.from_pretrained(prepare(name)).eval()
        except (ModelError, OSError, ValueError) as error:
            raise ConfigError(f"task.options.teacher={name!r} can't be loaded: {one_line(error)}") from None
        self._busy = threading.Lock()

    def logprobs(self, ids: list[int], start: int) -> list[float]:
        """[T] log-probabilities of `ids[start:]`."""
        import torch

        if start == len(ids):
            return []
        with self._busy, torch.inference_mode():
            logits = self._model(torch.tensor([ids[:-1]])).logits[0, start - 1 :].float()
            found = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        return [float(each) for each in found]
