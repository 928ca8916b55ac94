"""How well the engine's live weights answer held-out questions, greedily, while nothing else runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import aiohttp

from inflight.completions import complete
from inflight.config import RunConfig
from inflight.prompts import ModelTokens
from inflight.tasks import Item, base, make

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answers:
    """The mean score and the tokens of each answer."""

    reward: float
    token_ids: list[list[int]]


class Questions:
    """The held-out questions of a seed's task."""

    def __init__(self, config: RunConfig, tokens: ModelTokens) -> None:
        self._task = make(config.task, config.seed)
        held_out = cast(base.HeldOut, self._task)
        self._tokens = tokens
        self._items: list[Item] = [held_out.held_out_item(index) for index in range(held_out.held_out_size())]
        self.prompts = [[int(each) for each in tokens.encode(item.prompt)] for item in self._items]

    async def reward(self, answers: Sequence[list[int]]) -> float:
        """The mean score of one answer to each question, in their order."""
        pairs = zip(self._items, answers, strict=True)
        scores = [await self._task.score(item, self._tokens.decode(ids)) for item, ids in pairs]
        return float(sum(scores) / len(scores))


class HeldOut:
    """The held-out questions, asked of the engine."""

    def __init__(self, config: RunConfig, tokens: ModelTokens) -> None:
        self._questions = Questions(config, tokens)
        self._request = {
            "n": 1,
            "stream": False,
            "max_tokens": config.rollout.max_tokens,
            "temperature": 0.0,
            "logprobs": 0,
            "return_packed_logprobs": True,
        }

    def ask(self, url: str, version: int) -> Answers:
        """All of them at once. Raises RuntimeError when an answer is not of `version`, and what `complete` raises."""
        return asyncio.run(self._ask(url, version))

    async def _ask(self, url: str, version: int) -> Answers:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            turns = await asyncio.gather(
                *(
                    complete(session, "the generator", url, {**self._request, "prompt": prompt}, TIMEOUT_S)
                    for prompt in self._questions.prompts
                )
            )
        found = {span.version for turn in turns for span in turn.token_versions}
        if found != {version}:
            raise RuntimeError(f"the held-out questions were answered under versions {sorted(found)}, not {version}")
        token_ids = [[int(token) for token in turn.token_ids] for turn in turns]
        return Answers(await self._questions.reward(token_ids), token_ids)
