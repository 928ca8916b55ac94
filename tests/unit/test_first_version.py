"""No tokens before a publisher's first version, through the ASGI application that is put before vLLM's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inflight.generator.agent import Commits
from inflight.generator.first_version import FirstVersion

PASSED = {"type": "http.response.start", "status": 200}


async def vllm(scope: Any, receive: Any, send: Any) -> None:
    await send(PASSED)


def ask(opening: FirstVersion, kind: str = "http", **scope: str) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(opening({"type": kind, "path": "/v1/completions", **scope}, None, send))
    return sent


@pytest.mark.parametrize("listening", [False, True])
def test_what_runs_the_model_is_refused_until_a_version_is_live(listening: bool) -> None:
    opening = FirstVersion(vllm)
    commits = Commits(None, "")
    if listening:
        opening.commits = commits
    start, body = ask(opening, method="POST")
    assert start["status"] == 503
    assert b"no version of a publisher is live yet" in body["body"]
    assert ask(opening, "websocket") == [{"type": "websocket.close", "code": 1013}]
    assert ask(opening, method="GET") == ask(opening, "lifespan") == [PASSED]
    opening.commits = commits
    commits.version = 0
    assert ask(opening, method="POST") == ask(opening, "websocket") == [PASSED]
