"""A generator answers requests as actors ask them before it takes traffic, and their results do not delay it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from openai_server import Server, choice

from inflight.completions import sampling
from inflight.config import GeneratorConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig
from inflight.generator.warmup import TOGETHER, warm_up

ANSWER = choice(token_versions=[[0, -1]])
ROLLOUT = RolloutConfig(max_tokens=40, top_p=0.9, temperature=0.7)


def warmed(tmp_path: Any, answer: Any = ANSWER, **generator: Any) -> list[dict[str, Any]]:
    """The requests that a server got."""
    config = RunConfig(
        model=ModelConfig("tiny"),
        task=TaskConfig("addition"),
        run_dir=str(tmp_path),
        rollout=ROLLOUT,
        generator=GeneratorConfig(**generator),
    )

    async def run() -> list[dict[str, Any]]:
        async with Server(answer) as server:
            await warm_up(config, server.url, vocabulary=96)
            return server.requests

    return asyncio.run(run())


@pytest.mark.parametrize("room", [4, 256])
def test_it_answers_one_and_then_several_as_actors_ask_them(tmp_path, room: int) -> None:
    first, *others = warmed(tmp_path, max_num_seqs=room)
    assert len(others) == min(room, TOGETHER)
    actors = sampling(ROLLOUT, 96)
    assert actors["logprobs"] == 20, "what compiles at the first request"
    for request in (first, *others):
        own = {"prompt", "seed", "max_tokens", "min_tokens"}
        assert {k: v for k, v in request.items() if k not in own} == {k: v for k, v in actors.items() if k not in own}
        assert all(0 <= token < 96 for token in request["prompt"])


def test_failures_are_logged_and_have_no_other_effect(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(warmed(tmp_path, answer=lambda: 500)) == 1
    assert "1 of the first requests failed: http 500: because" in caplog.text
