"""A small real HTTP server that answers like a patched vLLM, for the tests of the actor (not a test file)."""

import asyncio
import json

from aiohttp import web
from packed_samples import packed

ALPHABET = "0123456789+= \n"


class Tokens:
    """One token a character, like the tiny models."""

    size = len(ALPHABET)

    def encode(self, text):
        return [ALPHABET.index(character) for character in text]

    def decode(self, token_ids):
        return "".join(ALPHABET[token] for token in token_ids)


def choice(text="07", version=0, **changes):
    """A finished choice whose tokens were all sampled under `version`."""
    token_ids = Tokens().encode(text)
    return {
        "index": 0,
        "text": text,
        "finish_reason": "stop",
        "logprobs": None,
        "packed_logprobs": packed(token_ids),
        "token_versions": [[0, version]] if token_ids else [],
        "prefill_versions": [[0, 0, version]],
        "extra": "ignored",
    } | changes


def chunk(text, start=0, version=0, finish=None, **changes):
    """A choice of a stream: tokens from the answer's `start`-th on, whose prefill events come with the last chunk."""
    prefills = [[0, 0, version]] if finish else []
    spans = [[start, version]] if text else []
    return choice(text, finish_reason=finish, token_versions=spans, prefill_versions=prefills, **changes)


class Server:
    """`async with Server() as server`: serves on loopback, keeps all requests, gives the configured answers.

    `answers` is consumed first, one a request: a dict is the choice, an int a bare HTTP status, None drops the
    connection, a callable is awaited for one of these. Afterwards `default` is used. A list is a stream's events one
    by one: a dict is a choice, a text the event as it is, None drops the connection, a callable is awaited.
    """

    def __init__(self, default=None):
        self.default = default or choice
        self.answers = []
        self.requests = []
        self.health = 200
        self.active = self.most_active = 0

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _health(self, request):
        return web.Response(status=self.health)

    async def _complete(self, request):
        body = await request.json()
        self.requests.append(body)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            answer = self.answers.pop(0) if self.answers else self.default
            while callable(answer):
                answer = answer()
                if asyncio.iscoroutine(answer):
                    answer = await answer
            if answer is None:
                request.transport.abort()
                return web.Response()
            if isinstance(answer, int):
                return web.Response(status=answer, text="because")
            if body.get("stream"):
                return await self._stream(request, answer if isinstance(answer, list) else [answer, "[DONE]"])
            return web.json_response({"id": "x", "model": "m", "choices": [answer], "usage": {}})
        finally:
            self.active -= 1

    async def _stream(self, request, events):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            if event is None:
                request.transport.abort()
                break
            if callable(event):
                await event()
                continue
            text = event if isinstance(event, str) else json.dumps({"id": "x", "choices": [event]})
            await response.write(f"data: {text}\n\n".encode())
        return response
