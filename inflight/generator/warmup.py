"""First requests, made before a generator takes traffic.

Some of what a request needs is compiled when it is first asked for, log-probabilities above all. The step that compiles
takes seconds, and a commit that comes meanwhile waits for it. So each generator answers a few requests, as an actor
asks them, before its engine says hello to the publisher: one, and then several in the same steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import aiohttp

from inflight.completions import sampling
from inflight.config import RunConfig

logger = logging.getLogger(__name__)

WARM_UP_S = 120.0
"""Bound of each request, the ones together."""
TOGETHER = 16
"""Requests in a batch: kernels that take batches of odd and even sizes in two ways have met both then."""
TOKENS = 3
"""Of an answer: the first comes of the prefill, the second of a step as it was captured or compiled."""


async def warm_up(config: RunConfig, url: str, vocabulary: int) -> None:
    """Asks the server at `url` as actors will. `vocabulary` is how many tokens its model has.

    Nothing is learnt from the answers, which are of no version yet. What goes wrong is logged and no more: the first
    requests are slow then, or fail for reasons that an actor counts.
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
    """An actor's request for a prompt of one token, with a short answer."""
    tokens = min(TOKENS, config.rollout.max_tokens)
    return sampling(config.rollout, vocabulary) | {
        "prompt": [seed % vocabulary],
        "seed": seed,
        "max_tokens": tokens,
        "min_tokens": tokens,
    }


async def _ask(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> str:
    """Why there was no answer; empty when there was."""
    try:
        async with session.post(f"{url}/v1/completions", json=request) as response:
            body = await response.read()
            return "" if response.status == 200 else f"http {response.status}: {body[:300].decode('utf-8', 'replace')}"
    except TimeoutError:
        return f"no answer within {WARM_UP_S:.0f} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"{type(error).__name__}: {error}"
