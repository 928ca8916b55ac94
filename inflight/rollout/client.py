"""One completion from one generator over HTTP: token ids in, a `Turn` with exact versions out.

A sample is a request of its own (n = 1), not one of G choices: a failed one is asked for again without losing its
siblings, a group spreads over generators, and each answer carries the spans of exactly one sequence.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from inflight.config import RolloutConfig
from inflight.types import PrefillSpan, Turn, VersionSpan, versions_of_tokens

MAX_ANSWER_BYTES = 64 << 20


class Unpatched(RuntimeError):
    """The server does not tag tokens with versions: no rollout of it can be used, ever."""


class Retry(Exception):
    """This attempt failed, another one may succeed; `reason` is what it is counted by."""

    def __init__(self, reason: str, *, down: bool = False, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.down = down
        """Whether the generator should be left alone until it answers /health again."""


class Rejected(Exception):
    """The server understood the request and refuses it: asking again would not help."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    token_versions: list[VersionSpan] | None = None
    prefill_versions: list[PrefillSpan] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Answer)


def sampling(config: RolloutConfig) -> dict[str, Any]:
    """The request's part that is equal for all samples; every knob is set, so no server default can creep in."""
    return {
        "n": 1,
        "stream": False,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
    }


def parse_turn(body: bytes, generator: str) -> Turn:
    """The turn of a completions answer.

    Raises Unpatched when it has no version tags, Retry("aborted") when the engine gave the request up and
    Retry("malformed answer") for anything else that is not one whole sample.
    """
    try:
        answer = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Retry("malformed answer", detail=f"{generator}: {error}") from None
    if len(answer.choices) != 1:
        raise Retry("malformed answer", detail=f"{generator}: {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    if choice.finish_reason in (None, "abort", "error"):
        raise Retry("aborted", detail=f"{generator}: finish_reason {choice.finish_reason}")
    if choice.token_versions is None or choice.prefill_versions is None:
        raise Unpatched(f"{generator} answers without token_versions: its vLLM is not patched (inflight patch apply)")
    if choice.token_ids is None or choice.logprobs is None:
        raise Retry("malformed answer", detail=f"{generator}: no token_ids or no logprobs")
    logprobs = [value for value in choice.logprobs.token_logprobs if value is not None]
    try:
        versions_of_tokens(choice.token_versions, len(choice.token_ids))
    except ValueError as error:
        raise Retry("malformed answer", detail=f"{generator}: {error}") from None
    if len(logprobs) != len(choice.token_ids):
        raise Retry(
            "malformed answer", detail=f"{generator}: {len(logprobs)} logprobs for {len(choice.token_ids)} tokens"
        )
    return Turn(
        token_ids=choice.token_ids,
        logprobs=logprobs,
        token_versions=choice.token_versions,
        prefill_versions=choice.prefill_versions,
        finish_reason=choice.finish_reason,
    )


async def complete(
    session: aiohttp.ClientSession, generator: str, url: str, request: dict[str, Any], timeout_s: float
) -> Turn:
    """Sends one request and waits for its turn, at most `timeout_s`.

    Raises Retry, Rejected or Unpatched.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(f"{url}/v1/completions", json=request, timeout=timeout) as response:
            status, body = response.status, await _read(response, generator)
    except TimeoutError:
        raise Retry("request timeout", detail=f"{generator}: no answer within {timeout_s:.0f} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Retry("connection lost", down=True, detail=f"{generator}: {type(error).__name__}: {error}") from None
    if status == 200:
        return parse_turn(body, generator)
    detail = f"{generator}: http {status}: {body[:300].decode('utf-8', 'replace')}"
    if 400 <= status < 500 and status not in (408, 429):
        raise Rejected(f"http {status}", detail)
    raise Retry(f"http {status}", down=status == 503, detail=detail)


async def _read(response: aiohttp.ClientResponse, generator: str) -> bytes:
    """The body, bounded."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise Retry("malformed answer", detail=f"{generator}: more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


async def healthy(session: aiohttp.ClientSession, url: str, timeout_s: float) -> bool:
    """Whether the server answers /health with 200 within `timeout_s`."""
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
