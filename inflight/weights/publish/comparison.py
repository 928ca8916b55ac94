"""Compares generators with the trainer: each generator samples a few tokens, and the trainer scores the same tokens.

Two implementations of a model that share its weights may still differ: rope scaling, sliding windows, soft caps, dtypes
or a vLLM that is wrong with CUDA graphs. No error is raised then, but each recorded log-probability is wrong, and so is
each ratio that the trainer computes from it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from inflight import agreement
from inflight.agreement import Agreement
from inflight.completions import NOT_FINITE, Rejected, RetryableFailure, Unpatched, complete
from inflight.config import Sampling
from inflight.types import Route, Turn, versions_of_tokens

REQUESTS = 16
"""Most prompts of a comparison."""
TOKENS = 8
"""Tokens by which each prompt is continued."""
ANSWER_S = 120.0
"""Seconds for all answers of a generator, beside its other requests: a busy CPU takes a minute."""
SUSPECTS = "rope scaling, sliding window, logit soft cap, dtype, temperature, vocabulary"
_POLL_S = 0.2


class Sampled(NamedTuple):
    """A prompt and a generator's continuation of it."""

    prompt_ids: list[int]
    token_ids: list[int]


class _NoNumber(str):
    """An answer was refused because a log-probability would be NaN or infinite; the text says which."""

    __slots__ = ()


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
    named = {"model": model} if model else {}
    requests = [_request(list(map(int, prompt)), sampling, seed) | named for seed, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(1, "comparison") as pool:  # the caller may have an event loop of its own
        answers = pool.submit(asyncio.run, _ask_all(served, requests, timeout_s, api_key, stop)).result()
    found = []
    for name, route in served.items():
        whole, unanswered = _of_version(answers[name], route.version)
        asked = [
            Sampled(request["prompt"], turn.token_ids.tolist())
            for request, turn in zip(requests, whole, strict=True)
            if turn
        ]
        recorded = [turn.logprobs for turn in whole if turn]
        result = Comparison(name, route.incarnation, route.version, unanswered=unanswered)
        if asked:
            alone = [number in _alone(requests) for number, turn in enumerate(whole) if turn]
            scored = _scored(score, asked)
            verdict, problem = _judge(asked, recorded, scored, dtype, sampling.temperature, alone)
            result = dataclasses.replace(result, agreement=verdict, problem=problem)
        wrong = [
            each["prompt"] for each, got in zip(requests, answers[name], strict=True) if isinstance(got, _NoNumber)
        ]
        if wrong:
            problem = f"after a prompt of {len(wrong[0])} tokens, a log-probability is no number"
            result = dataclasses.replace(result, problem=problem)
        found.append(result)
    return found


def require(found: Sequence[Comparison]) -> None:
    """Raises NumbersDiffer when one of them disagrees or was not compared, and when there is none."""
    wrong = [each for each in found if not each.shown]
    if wrong or not found:
        raise NumbersDiffer("; ".join(map(str, wrong)) or "no generator holds the trainer's version: none was compared")

    """A request like an actor's (completions.py); end-of-sequence is ignored, so that there are tokens to compare."""


def _request(prompt: list[int], sampling: Sampling, seed: int) -> dict[str, Any]:
    """As the actor asks (completions.py); an end of sequence does not end it, so that there is something to compare."""
    return {
        **dataclasses.asdict(Sampling.of(sampling)),
        "n": 1,
        "stream": False,
        "prompt": prompt,
        "seed": seed,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": 0,
        "return_packed_logprobs": True,
    }


async def _ask_all(
    served: Mapping[str, Route],
    requests: Sequence[dict[str, Any]],
    timeout_s: float,
    api_key: str,
    stop: Callable[[], bool],
) -> dict[str, list[Turn | str]]:
    """For each generator its answers, or the reasons why they are missing, in the order of the requests."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=headers) as session:
        deadline = asyncio.get_running_loop().time() + timeout_s

        async def ask(name: str, url: str, request: dict[str, Any]) -> Turn | str:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return f"{name}: no answer within {timeout_s:g} s"
            try:
                return await complete(session, name, url, request, left)
            except Rejected as error:
                return _NoNumber(error) if error.reason == NOT_FINITE else str(error)
            except (RetryableFailure, Unpatched) as error:
                return str(error)

        async def ask_one(name: str, url: str) -> list[Turn | str]:
            """In the order of the requests, which is not the order of sending."""
            answers: list[Turn | str] = ["given up"] * len(requests)
            first = _alone(requests)
            for number in first:
                answers[number] = await ask(name, url, requests[number])
            rest = [number for number in range(len(requests)) if number not in first]
            for number, answer in zip(
                rest, await asyncio.gather(*(ask(name, url, requests[each]) for each in rest)), strict=True
            ):
                answers[number] = answer
            return answers

        asking = {name: asyncio.create_task(ask_one(name, route.url)) for name, route in served.items()}
        pending = set(asking.values())
        while pending and not stop():
            _, pending = await asyncio.wait(pending, timeout=_POLL_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return {
            name: ["given up"] * len(requests) if task.cancelled() else task.result() for name, task in asking.items()
        }


def _alone(requests: Sequence[dict[str, Any]]) -> list[int]:
    """The first request of each length of prompt."""
    lengths = [len(request["prompt"]) for request in requests]
    return [lengths.index(length) for length in sorted(set(lengths))]


def _of_version(answers: Sequence[Turn | str], version: int) -> tuple[list[Turn | None], str]:
    """The answers computed under `version` from the first to the last token, None for the others, and the reasons."""
    whole: list[Turn | None] = []
    reasons = list[str]()
    for answer in answers:
        if isinstance(answer, str):
            reasons.append(answer)
        elif not answer.token_ids:
            reasons.append("an answer of no tokens")
        elif others := _versions(answer) - {version}:
            reasons.append(f"an answer of version {others.pop()}, not {version}")
        else:
            whole.append(answer)
            continue
        whole.append(None)
    return whole, f"{len(reasons)} of {len(answers)} requests: {reasons[0]}" if reasons else ""


def _versions(turn: Turn) -> set[int]:
    tokens = versions_of_tokens(turn.token_versions, len(turn.token_ids))
    return {*tokens, *(span.version for span in turn.prefill_versions)}


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
