"""A generator is killed in the middle of a sequence, and another real one continues it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "cpu"))

from rollout_requests import ServedModel

from inflight.actor.answers import Answers
from inflight.actor.pool import Pool
from inflight.audit.segments import UNKNOWN, segments
from inflight.completions import TOO_LONG, Rejected, sampling
from inflight.config import RolloutConfig
from inflight.types import PrefillSpan, Rollout, VersionSpan

pytestmark = [pytest.mark.faults, pytest.mark.vllm]

PROMPT = [3, 4, 5, 13]
LENGTH = 240
GREEDY = sampling(RolloutConfig(max_tokens=LENGTH), 17) | {"temperature": 0.0, "ignore_eos": True}
TOLERANCE = 1e-4
"""Nats; float32 throughout."""


async def nothing_to_decode(token_ids):
    raise AssertionError(token_ids)


@contextlib.asynccontextmanager
async def asking(*served):
    """Answers over a pool of the served models, named g0, g1, … in their order."""
    urls = {f"g{number}": each.url for number, each in enumerate(served)}
    async with aiohttp.ClientSession() as session, Pool(session, list(urls), urls.__getitem__) as pool:
        await pool.wait_any(60)
        async with asyncio.timeout(60):
            while not all(generator.up for generator in pool.generators.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield Answers(session, pool, GREEDY, silence_s=60.0, decode=nothing_to_decode)


async def interrupted(first, second):
    """The same answer as a whole, by the second, and begun by the first, which is killed with its first chunk."""
    async with asking(second) as answers:
        whole = await answers.finish(answers.begin(PROMPT), PROMPT, 0)
    async with asking(first, second) as answers:
        answer = answers.begin(PROMPT)
        asked = asyncio.create_task(answers.finish(answer, PROMPT, 0))
        async with asyncio.timeout(120):
            while not answers.tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        os.killpg(first.process.pid, signal.SIGKILL)
        turn = await asyncio.wait_for(asked, 240)
    return whole, answer, turn


async def refused_and_fitting(served, limit):
    """Answers to prompts around the context's length."""
    async with asking(served) as answers:
        long, fits = [3] * (limit + 1), [3] * (limit - 1)
        with pytest.raises(Rejected) as error:
            await answers.finish(answers.begin(long), long, 0)
        assert error.value.reason == TOO_LONG
        turn = await answers.finish(answers.begin(fits), fits, 0)
        return len(turn.token_ids)


def replayed(policy, ids):
    """[T] log-probabilities of the tokens after the prompt, in one pass of plain transformers."""
    with torch.no_grad():
        logprobs = policy(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    return logprobs[range(len(PROMPT) - 1, len(ids) - 1), ids[len(PROMPT) :]]


def test_a_killed_generators_sequence_is_the_one_that_it_would_have_been(tmp_path):
    """Greedy, and by the same weights, which the second generator has under another version's number."""
    with contextlib.ExitStack() as stack:
        models = []
        for name in ("first", "second"):
            models.append(ServedModel(tmp_path / name, "tiny"))
            stack.callback(models[-1].close)
        first, second = models
        second.publisher.publish(1)
        second.publisher.flush(60)
        whole, answer, turn = asyncio.run(interrupted(first, second))
        assert asyncio.run(refused_and_fitting(second, second.config.generator.max_model_len)) == 1

    seam = answer.pieces[1].start
    assert [piece.generator for piece in answer.pieces] == ["g0", "g1"]
    assert 0 < seam < len(whole.token_ids)
    assert answer.retries == {"connection lost": 1}
    assert turn.token_ids == whole.token_ids
    assert turn.finish_reason == whole.finish_reason
    assert turn.token_versions == [VersionSpan(0, 0), VersionSpan(seam, 1)]
    last = len(PROMPT) - 1
    assert turn.prefill_versions == [PrefillSpan(0, 0, UNKNOWN), PrefillSpan(0, last, 0), PrefillSpan(seam, 0, 1)]
    known = torch.tensor(turn.logprobs) - replayed(second.policy, [*PROMPT, *turn.token_ids])
    assert known.abs().max() < TOLERANCE
    rollout = Rollout(
        rollout_id="q0/0",
        group_id="q0",
        prompt_ids=PROMPT,
        turn=turn,
        reward=0.0,
        generator=answer.generator,
        started=0.0,
        finished=1.0,
        first_token_s=0.0,
        pieces=answer.pieces,
    )
    assert segments(rollout)[-1].version == 1
