"""Compares generators with the trainer: each generator samples a few tokens, and the trainer scores the same tokens.

Two implementations of a model that share its weights may still differ: rope scaling, sliding windows, soft caps, dtypes
or a vLLM that is wrong with CUDA graphs. No error is raised then, but each recorded log-probability is wrong, and so is
each ratio that the trainer computes from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from inflight import agreement
from inflight.agreement import Agreement
from inflight.config import Sampling
from inflight.types import Route, Turn
from inflight.weights.publish.asking import ANSWER_S, NoNumber, ask_all, of_version, request_of, sent_alone

REQUESTS = 16
"""Most prompts of a comparison."""
SUSPECTS = "rope scaling, sliding window, logit soft cap, dtype, temperature, vocabulary"


class Sampled(NamedTuple):
    """A prompt and a generator's continuation of it."""

    prompt_ids: list[int]
    token_ids: list[int]


Score = Callable[[Sequence[Sampled]], Sequence[Sequence[float]]]
"""For each sequence, the log-probability in nats of each token of its `token_ids` given all tokens before it, under the
distribution that the request asked for."""


class NumbersDiffer(RuntimeError):
    """A generator does not compute what the trainer does, or none was compared; one line with figures and suspects."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result for one generator."""

    generator: str
    incarnation: str
    version: int
    agreement: Agreement | None = None
    """Of all tokens that were compared; None if there were none."""
    problem: str = ""
    """The disagreement with its figure; empty if there is none."""
    unanswered: str = ""
    """Why it was not compared, or only in part."""

    @property
    def shown(self) -> bool:
        """Whether all was compared, and agrees."""
        return not self.problem and not self.unanswered

    def __str__(self) -> str:
        if self.problem:
            return (
                f"{self.generator} does not compute what the trainer does, at version {self.version}: {self.problem}; "
                f"the usual suspects: {SUSPECTS}"
            )
        if self.unanswered:
            return f"{self.generator} could not be compared with the trainer: {self.unanswered}"
        return f"{self.generator} computes what the trainer does, at version {self.version}"

    def values(self) -> dict[str, Any]:
        """For metrics."""
        found = self.agreement
        figures = {} if found is None else {"tokens": found.tokens, "median": found.median, "largest": found.largest}
        return {"version": self.version, "agrees": self.shown, **figures}


def compare(
    served: Mapping[str, Route],
    score: Score,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: str,
    sampling: Sampling,
    timeout_s: float = ANSWER_S,
    api_key: str = "",
    stop: Callable[[], bool] = lambda: False,
    model: str = "",
) -> list[Comparison]:
    """Sends requests to all generators at once, scores and judges each; results are in the order of `served`.

    The first prompt of each length is sent alone, the others of that generator together afterwards: a CUDA graph that
    is wrong for one batch size does not show in another. `prompts` are token ids, at most REQUESTS; `dtype` is the
    coarser one of both computations; `sampling` must not truncate, because what top-p leaves of a distribution does not
    depend on the model alone. Ends early when `stop()` returns True. Raises ValueError for other input, or when `score`
    does not return one number per token; errors of `score` are passed on.
    """
    if not 1 <= len(prompts) <= REQUESTS or not all(prompts):
        raise ValueError(f"{len(prompts)} prompts to compare by: 1 to {REQUESTS} are allowed, none of them empty")
    if sampling.cuts:
        raise ValueError("numbers are compared without top-p, top-k and min-p")
    requests = [request_of(list(map(int, prompt)), sampling, seed, model) for seed, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(1, "comparison") as pool:  # the caller may have an event loop of its own
        answers = pool.submit(asyncio.run, ask_all(served, requests, timeout_s, api_key, stop)).result()
    return [
        _of_one(name, route, requests, answers[name], score, dtype, sampling.temperature)
        for name, route in served.items()
    ]


def _of_one(
    name: str,
    route: Route,
    requests: Sequence[dict[str, Any]],
    answers: Sequence[Turn | str],
    score: Score,
    dtype: str,
    temperature: float,
) -> Comparison:
    """What one generator's answers say; those of another version are left out."""
    whole, unanswered = of_version(answers, route.version)
    answered = [(number, turn) for number, turn in enumerate(whole) if turn]
    asked = [Sampled(requests[number]["prompt"], turn.token_ids.tolist()) for number, turn in answered]
    verdict: Agreement | None = None
    problem = ""
    if asked:
        recorded = [turn.logprobs for _, turn in answered]
        alone = [number in sent_alone(requests) for number, _ in answered]
        verdict, problem = _judge(asked, recorded, _scored(score, asked), dtype, temperature, alone)
    wrong = [request["prompt"] for request, got in zip(requests, answers, strict=True) if isinstance(got, NoNumber)]
    if wrong:
        problem = f"after a prompt of {len(wrong[0])} tokens, a log-probability is no number"
    return Comparison(name, route.incarnation, route.version, verdict, problem, unanswered)


def require(found: Sequence[Comparison]) -> None:
    """Raises NumbersDiffer when one of them disagrees or was not compared, and when there is none."""
    wrong = [each for each in found if not each.shown]
    if wrong or not found:
        raise NumbersDiffer("; ".join(map(str, wrong)) or "no generator holds the trainer's version: none was compared")


def _scored(score: Score, asked: Sequence[Sampled]) -> list[list[float]]:
    scored = [[float(value) for value in values] for values in score(asked)]
    given = [len(values) for values in scored]
    wanted = [len(each.token_ids) for each in asked]
    if given != wanted:
        raise ValueError(f"score returns {given} log-probabilities for sequences of {wanted} tokens")
    return scored


def _judge(
    asked: Sequence[Sampled],
    recorded: Sequence[Sequence[float]],
    scored: Sequence[Sequence[float]],
    dtype: str,
    temperature: float,
    alone: Sequence[bool],
) -> tuple[Agreement, str]:
    """The agreement of all tokens, and what is wrong: with all, or with those of one prompt length, `alone` or not.

    A window or rope scaling shows only beyond a length, and a wrong CUDA graph only for one batch size, where there may
    be few tokens; for these the median is judged, for which a few are enough.
    """
    ours = np.concatenate(scored)
    theirs = np.concatenate(recorded)
    lengths = np.repeat([len(each.prompt_ids) for each in asked], [len(each.token_ids) for each in asked])
    prompt = np.repeat(np.arange(len(asked)), [len(each.token_ids) for each in asked])

    def of(which: np.ndarray) -> Agreement:
        return agreement.compare(theirs[which], ours[which], dtype, temperature=temperature, prompt=prompt[which])

    whole = of(lengths > 0)
    by_itself = np.repeat(alone, [len(each.token_ids) for each in asked])
    for length, single in sorted(set(zip(lengths.tolist(), by_itself.tolist(), strict=True))):
        part = of((lengths == length) & (by_itself == single))
        if part.steps > agreement.TYPICAL:
            sent = "sent alone" if single else "sent together"
            return whole, f"after prompts of {length} tokens {sent}, {part.problems[0]}"
    if whole.agrees:
        return whole, ""
    with np.errstate(invalid="ignore"):
        at = int(np.nanargmax(np.nan_to_num(np.abs(theirs - ours), nan=np.inf)))
    return whole, f"{'; '.join(whole.problems)} ({whole.tokens} tokens, the largest after a prompt of {lengths[at]})"
