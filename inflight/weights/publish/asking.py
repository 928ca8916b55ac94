"""Asks each generator over HTTP for a few tokens, for the comparison with the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.completions import (
    NOT_FINITE,
    Rejected,
    RetryableFailure,
    Unpatched,
    base_request,
    complete,
    session_of,
)
from inflight.config import Sampling
from inflight.types import Route, Turn, versions_of

TOKENS = 8
"""Tokens by which each prompt is continued."""
ANSWER_S = 120.0
"""Seconds for all answers of a generator, beside its other requests: a busy CPU takes a minute."""
CONNECTIONS = 100
"""Most requests that are under way at a time, to all generators."""
_POLL_S = 0.2


class NoNumber(str):
    """An answer was refused because a log-probability would be NaN or infinite; the text says which."""

    __slots__ = ()


def request_of(prompt: list[int], sampling: Sampling, seed: int, model: str = "") -> dict[str, Any]:
    """A request like an actor's; end-of-sequence is ignored, so that there are tokens to compare."""
    own = {"prompt": prompt, "seed": seed, "ignore_eos": True}
    return base_request(sampling, TOKENS, model=model) | own


async def ask_all(
    served: Mapping[str, Route],
    requests: Sequence[dict[str, Any]],
    timeout_s: float,
    api_key: str,
    stop: Callable[[], bool],
) -> dict[str, list[Turn | str]]:
    """For each generator its answers, or the reasons why they are missing, in the order of the requests."""
    async with session_of(api_key, connections=CONNECTIONS) as session:
        deadline = asyncio.get_running_loop().time() + timeout_s

        async def ask(name: str, url: str, request: dict[str, Any]) -> Turn | str:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return f"{name}: no answer within {timeout_s:g} s"
            try:
                return await complete(session, name, url, request, left)
            except Rejected as error:
                return NoNumber(error) if error.reason == NOT_FINITE else str(error)
            except (RetryableFailure, Unpatched) as error:
                return str(error)

        async def ask_one(name: str, url: str) -> list[Turn | str]:
            """In the order of the requests, which is not the order of sending."""
            answers: list[Turn | str] = ["given up"] * len(requests)
            first = sent_alone(requests)
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


def sent_alone(requests: Sequence[dict[str, Any]]) -> list[int]:
    """The first request of each length of prompt."""
    lengths = [len(request["prompt"]) for request in requests]
    return [lengths.index(length) for length in sorted(set(lengths))]


def of_version(answers: Sequence[Turn | str], version: int) -> tuple[list[Turn | None], str]:
    """The answers computed under `version` from the first to the last token, None for the others, and the reasons."""
    whole: list[Turn | None] = []
    reasons = list[str]()
    for answer in answers:
        if isinstance(answer, str):
            reasons.append(answer)
        elif not answer.token_ids:
            reasons.append("an answer of no tokens")
        elif others := versions_of(answer) - {version}:
            reasons.append(f"an answer of version {others.pop()}, not {version}")
        else:
            whole.append(answer)
            continue
        whole.append(None)
    return whole, f"{len(reasons)} of {len(answers)} requests: {reasons[0]}" if reasons else ""
