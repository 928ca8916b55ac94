"""First requests, made before a generator takes traffic.

Some of what a request needs is compiled on first use, above all for log-probabilities. The step that compiles takes
seconds, and a commit during that time waits for it. So each generator answers a few requests, built like an actor's,
before its engine says hello to the publisher: first one, then several in the same steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import aiohttp

from inflight.completions import sampling
from inflight.config import RunConfig
from inflight.error_line import one_line, with_kind

logger = logging.getLogger(__name__)

WARM_UP_S = 120.0
"""Timeout of the first request, and of the following ones together, in seconds."""
TOGETHER = 16
"""Concurrent requests: as they join and finish, kernels that treat odd and even batch sizes differently run on both."""
TOKENS = 3
"""Tokens per completion: the first comes from the prefill, the second from a captured or compiled decode step."""


async def warm_up(config: RunConfig, url: str, vocabulary: int) -> None:
    """Sends requests like an actor's to the server at `url`. `vocabulary` is the model's vocabulary size.

    The answers, which belong to no version yet, are discarded. Failures are only logged: in that case the first real
    requests are slow, or fail for reasons that the actor counts.
    """
    key = config.api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    started = time.monotonic()
    together = min(config.generator.max_num_seqs, TOGETHER)
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=WARM_UP_S)) as session:
        for count in (1, together):
            asked = (_ask(session, url, _request(config, vocabulary, seed)) for seed in range(count))
            if failed := [reason for reason in await asyncio.gather(*asked) if reason]:
                logger.warning("%d of the first requests failed: %s", len(failed), failed[0])
                return
    logger.info("%d first requests took %.1f s", 1 + together, time.monotonic() - started)


def _request(config: RunConfig, vocabulary: int, seed: int) -> dict[str, Any]:
    """A request like an actor's, for a prompt of one token and a short completion."""
    tokens = min(TOKENS, config.rollout.max_tokens)
    return sampling(config.rollout, vocabulary, config.trainer.adapter) | {
        "prompt": [seed % vocabulary],
        "seed": seed,
        "max_tokens": tokens,
        "min_tokens": tokens,
    }


async def _ask(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> str:
    """Returns why the request failed; empty when it succeeded."""
    try:
        async with session.post(f"{url}/v1/completions", json=request) as response:
            body = await response.read()
            said = one_line(body[:300].decode("utf-8", "replace"))
            return "" if response.status == 200 else f"http {response.status}: {said}"
    except TimeoutError:
        return f"no answer within {WARM_UP_S:.0f} s"
    except (aiohttp.ClientError, OSError) as error:
        return with_kind(error)
