"""What to ask of another generator, so that a sequence goes on as if its generator had not been lost.

The tokens so far become the end of the prompt. Temperature, top-p, top-k and min-p look at one distribution at a time;
the repetition penalty does not tell prompt from completion. What does tell them apart, or has a state of its own, can't
be continued through a prompt: such a sequence starts anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any

AS_THEY_ARE = {"n", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"}
ENDS = {"stop_token_ids", "ignore_eos"}
EVIDENCE = {"logprobs", "return_token_ids", "return_tokens_as_token_ids"}
CONTINUES = {"prompt", "max_tokens", "min_tokens", "seed"} | AS_THEY_ARE | ENDS | EVIDENCE
"""Fields of a request that a continuation takes over, as they are or for the tokens that are left."""
COUNTS_COMPLETION = ("presence_penalty", "frequency_penalty")
"""Penalties on what the completion holds; vLLM would not count the tokens that moved into the prompt."""


class StartAnew(Exception):
    """The sequence can't be continued exactly; `reason` names the field of the request that is in the way."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def rest_of(request: dict[str, Any], produced: Sequence[int]) -> dict[str, Any]:
    """The request for what is left of a sequence of which `produced` are there.

    Example: of `{"prompt": [1, 2], "max_tokens": 9, "min_tokens": 4, "seed": 7}` with `[5, 6, 6]` produced is left
    `{"prompt": [1, 2, 5, 6, 6], "max_tokens": 6, "min_tokens": 1, "seed": …}`. The seed is another one: the first draws
    of the old one have been used, and a token must not depend on the draw that made an earlier one.

    Raises StartAnew.
    """
    if not produced:
        return request
    for name, value in request.items():
        neutral = name in COUNTS_COMPLETION and value == 0
        if not neutral and name not in CONTINUES and value is not None:
            raise StartAnew(name)
    left = request["max_tokens"] - len(produced)
    if left < 1:
        raise StartAnew("max_tokens")
    changes: dict[str, Any] = {"prompt": [*request["prompt"], *produced], "max_tokens": left}
    if request.get("min_tokens"):
        changes["min_tokens"] = max(0, request["min_tokens"] - len(produced))
    if request.get("seed") is not None:
        digest = blake2b(f"{request['seed']}:{len(produced)}".encode(), digest_size=8).digest()
        changes["seed"] = int.from_bytes(digest) >> 1
    return request | changes


async def crossing_stop(
    decode: Callable[[list[int]], Awaitable[str]], token_ids: Sequence[int], seam: int, stops: Sequence[str]
) -> int | None:
    """How many of the tokens there are once the first stop string that lies across the seam is complete; None: there
    is none. A string within the newest piece is found by its generator, which does not see what came before.

    Example: with one token a character, stop `"ab"` and tokens `"xa" | "bc"` it is 3.
    """
    longest = max(map(len, stops), default=0)
    if longest < 2 or seam == 0:
        return None
    first = max(0, seam - longest)  # a token has a character at least, or belongs to one that does
    before = len(await decode(list(token_ids[first:seam])))
    for end in range(seam + 1, min(len(token_ids), seam + longest) + 1):
        text = await decode(list(token_ids[first:end]))
        if any(-1 < text.find(stop, max(0, before - len(stop) + 1)) < before for stop in stops):
            return end
    return None
