"""Reads a completion streamed by vLLM's OpenAI server: server-sent events, one JSON object in each.

vLLM sends a chunk for the first token, then one per `stream_interval` tokens, then the rest with the finish reason
(generator/engine_args.py). Chunks are processed as they arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import aiohttp
import msgspec

from inflight.actor.silence import SILENT, Call, Calls
from inflight.completions import MAX_ANSWER_BYTES, Choice, RetryableFailure, lost, malformed, refused, too_large
from inflight.http_body import bounded_body

CONNECT_S = 10.0
LOOKS_A_BOUND = 20
"""How often silence is checked within its timeout; the resulting delay is tolerable."""
DONE = b"[DONE]"


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[Choice] = []
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Chunk)


async def chunks(
    session: aiohttp.ClientSession, generator: str, url: str, request: dict[str, Any]
) -> AsyncGenerator[Choice, None]:
    """The chunks of a request's response, until the server marks its end.

    Raises RetryableFailure or Rejected. Ends only by them, by the server's last event or by cancellation; see
    `unless_silent`.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    try:
        async with session.post(f"{url}/v1/completions", json=request, timeout=timeout) as response:
            if response.status != 200:
                body = await bounded_body(response, MAX_ANSWER_BYTES, too_large(generator))
                raise refused(response.status, body, generator)
            async for choice in choices_of(response.content, generator):
                yield choice
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError: no connection within CONNECT_S
        raise lost(error, generator) from None


async def choices_of(content: aiohttp.StreamReader, generator: str) -> AsyncIterator[Choice]:
    """The choices in a body, until its last event; vLLM writes one line per event.

    Raises RetryableFailure or Rejected for an event that reports an error or is damaged, and for a body that ends
    before its last event. aiohttp's own line reader has a limit that the first chunk of a long prompt exceeds.
    """
    size = 0
    rest = b""
    async for data in content.iter_any():
        size += len(data)
        if size > MAX_ANSWER_BYTES:
            raise too_large(generator)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == DONE:
                return
            choice = _choice_of(event, generator)
            if choice is not None:
                yield choice
    raise RetryableFailure("connection lost", down=True, detail=f"{generator}: the stream ended before its last event")


def _choice_of(event: bytes, generator: str) -> Choice | None:
    """The choice in one event, if it has one."""
    try:
        chunk = _decoder.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(generator, error) from None
    if chunk.error is not None:
        code = chunk.error.code if isinstance(chunk.error.code, int) else 500
        raise refused(code, chunk.error.message.encode(), generator)
    if len(chunk.choices) > 1:
        raise malformed(generator, f"{len(chunk.choices)} choices instead of one")
    return chunk.choices[0] if chunk.choices else None


async def unless_silent(
    reading: Coroutine[Any, Any, None], call: Call, calls: Calls, generator: str, bound_s: float
) -> None:
    """Awaits `reading`, which reports tokens to `calls`, as long as tokens keep arriving.

    Raises what it raises, and RetryableFailure with the verdict when the request is presumed lost.
    """
    task = asyncio.ensure_future(reading)
    suspected = False
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=bound_s / LOOKS_A_BOUND)
            if done:
                return task.result()
            verdict = calls.verdict(call, time.monotonic(), bound_s)
            if verdict is not None and suspected:
                detail = f"{generator}: no token of this request for {bound_s:g} s"
                raise RetryableFailure(verdict, down=verdict == SILENT, detail=detail)
            suspected = verdict is not None  # twice: this process may have been suspended, with tokens in a socket
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
