"""One complete answer to a prompt, from as many generators as it takes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from inflight.actor.continuation import StartAnew, crossing_stop, rest_of
from inflight.actor.pool import Generator, Pool, Together
from inflight.actor.sequence import Sequence
from inflight.actor.silence import Call
from inflight.actor.streaming import chunks, unless_silent
from inflight.completions import MALFORMED, RetryableFailure
from inflight.types import GeneratorSpan, Turn

ATTEMPTS = 3
"""Requests in a row without a token after which a sample is given up."""
PAUSE_S = 0.2
"""Pause before a retry after two requests without a token; the first retry is made at once, at another generator."""
MAX_REASONS = 14
"""Most reasons of a sample's retries that are distinguished; types.Rollout holds 16."""


@dataclass
class SampleInProgress:
    """A sample in progress, with the record of its requests. Times are Unix seconds."""

    sequence: Sequence
    together: Together | None = None
    """The samples that it shares a long prompt with."""
    started: float = 0.0
    """When the first request was sent that contributed tokens."""
    first_token_s: float = 0.0
    """Seconds from then to the first token."""
    retries: Counter[str] = field(default_factory=Counter)
    """Requests that failed or delivered only a part, by reason."""

    @property
    def length(self) -> int:
        """Number of completion tokens so far."""
        return self.sequence.length

    @property
    def generator(self) -> str:
        """The generator of the last token."""
        return self.sequence.pieces[-1].generator

    @property
    def pieces(self) -> list[GeneratorSpan]:
        """Which generator made which tokens; empty if one made all."""
        return self.sequence.pieces if len(self.sequence.pieces) > 1 else []


class Answers:
    """Sends requests to the generators of a pool. Its only state is counters, so any number of answers may run at
    once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pool: Pool,
        request: dict[str, Any],
        *,
        silence_s: float,
        decode: Callable[[list[int]], Awaitable[str]],
    ) -> None:
        """`request` has the fields that all requests share; `silence_s` bounds the time without a token; `decode` gives
        the text of tokens, and an error that it raises ends the answer."""
        self._session = session
        self._pool = pool
        self._request = request | {"stream": True}
        self._silence_s = silence_s
        self._decode = decode
        self.aborted = 0
        """Requests that an engine aborted; they were continued."""
        self.retries = 0
        """Attempts that failed and were retried, including aborted ones."""
        self.continued = 0
        """Sequences that another generator continued, counted each time."""
        self.tokens = 0
        """Tokens received, including those of sequences that were restarted."""

    def begin(self, prompt_ids: list[int], together: Together | None = None) -> SampleInProgress:
        """A new sample, before its first request."""
        sequence = Sequence(len(prompt_ids), self._request["max_tokens"], self._request["logprobs"])
        return SampleInProgress(sequence, together)

    async def finish(self, answer: SampleInProgress, prompt_ids: list[int], seed: int | None) -> Turn:
        """Sends requests until the sample is complete; returns the complete sequence.

        Raises RetryableFailure when ATTEMPTS in a row brought no token, Rejected, Unpatched or NoGenerator.
        """
        request = self._request | {"prompt": prompt_ids} | ({} if seed is None else {"seed": seed})
        avoid: list[str] = []
        fruitless = 0
        while True:
            had = answer.sequence.length
            async with self._pool.lease(avoid, self._silence_s, answer.together) as generator:
                try:
                    return await self._attempt(generator, request, answer)
                except RetryableFailure as error:
                    if error.down:
                        self._pool.mark_down(generator)
                    self._count(answer, error.reason)
                    fruitless = 0 if answer.sequence.length > had else fruitless + 1
                    if fruitless >= ATTEMPTS:
                        raise
                    avoid.append(generator.name)
            await asyncio.sleep(PAUSE_S * max(0, fruitless - 1))

    async def _attempt(self, generator: Generator, request: dict[str, Any], answer: SampleInProgress) -> Turn:
        """Requests the rest from one generator; returns the complete sequence. Raises RetryableFailure after closing
        this generator's part."""
        sequence = answer.sequence
        try:
            rest = rest_of(request, sequence.token_ids)
        except StartAnew:
            answer.retries["started anew"] += 1
            sequence.restart()
            rest = request
        if sequence.length:
            self.continued += 1
        else:
            answer.started = time.time()
        sequence.begin(generator.name)
        call = Call(asked=time.monotonic())
        try:
            reading = self._read(generator, rest, answer, call)
            await unless_silent(reading, call, generator.calls, generator.name, self._silence_s)
            sequence.read()
            if sequence.finish_reason in (None, "abort", "error"):
                raise RetryableFailure("aborted", detail=f"{generator.name}: finish_reason {sequence.finish_reason}")
            return sequence.turn()
        except RetryableFailure as error:
            if error.reason == MALFORMED:
                sequence.drop_piece()
            else:
                sequence.lose()
            raise

    async def _read(self, generator: Generator, request: dict[str, Any], answer: SampleInProgress, call: Call) -> None:
        """Reads a stream until it ends, or until a stop string that began in an earlier part is complete."""
        sequence = answer.sequence
        stops = request.get("stop") or ()
        seam = sequence.length
        async with aclosing(chunks(self._session, generator.name, generator.url, request)) as stream:
            async for choice in stream:
                had = sequence.length
                sequence.add(choice)
                if sequence.length == had:
                    continue
                generator.calls.hear(call, time.monotonic())
                generator.version = max(generator.version, sequence.newest_version)
                self.tokens += sequence.length - had
                if had == 0:
                    answer.first_token_s = max(0.0, time.time() - answer.started)
                if not stops or not seam:
                    continue
                end = await crossing_stop(self._decode, sequence.token_ids, seam, stops, searched=had)
                if end is not None:
                    sequence.cut(end)
                    sequence.lose()
                    sequence.finish_reason = "stop"
                    return

    def _count(self, answer: SampleInProgress, reason: str) -> None:
        answer.retries[reason if len(answer.retries) < MAX_REASONS else "other"] += 1
        self.retries += 1
        self.aborted += reason == "aborted"
