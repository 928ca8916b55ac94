"""The request by which another generator continues the sequence of a lost one exactly.

The tokens so far are appended to the prompt. Temperature, top-p, top-k and min-p depend on one distribution at a time,
and the repetition penalty does not distinguish prompt from completion. Sampling that does distinguish them, or that has
a state of its own, can't be continued through a prompt: such a sequence is restarted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from inflight.completions import seed_of

AS_THEY_ARE = {"n", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"}
ENDS = {"stop_token_ids", "ignore_eos"}
EVIDENCE = {"logprobs", "return_packed_logprobs"}
CONTINUES = {"prompt", "max_tokens", "min_tokens", "seed"} | AS_THEY_ARE | ENDS | EVIDENCE
"""Fields of a request that a continuation copies or adapts to the remaining tokens."""
COUNTS_COMPLETION = ("presence_penalty", "frequency_penalty")
"""Penalties on tokens of the completion; vLLM would not count the tokens that moved into the prompt."""


class StartAnew(Exception):
    """The sequence can't be continued exactly; `reason` names the request field that prevents it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def rest_of(request: dict[str, Any], produced: Sequence[int]) -> dict[str, Any]:
    """The request for the rest of a sequence of which the tokens `produced` exist.

    Example: for `{"prompt": [1, 2], "max_tokens": 9, "min_tokens": 4, "seed": 7}` and `[5, 6, 6]` produced, the rest is
    `{"prompt": [1, 2, 5, 6, 6], "max_tokens": 6, "min_tokens": 1, "seed": …}`. The seed differs: the first random draws
    of the old one are used, and a token must not depend on the draw that made an earlier one.

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
        changes["seed"] = seed_of(f"{request['seed']}:{len(produced)}")
    return request | changes


async def crossing_stop(
    decode: Callable[[list[int]], Awaitable[str]],
    token_ids: Sequence[int],
    seam: int,
    stops: Sequence[str],
    searched: int = 0,
) -> int | None:
    """Number of tokens up to the end of the first stop string that crosses the seam; None if there is none. A stop
    string within the newest piece is found by its generator, which does not see the tokens before. The caller knows
    that none ends within the first `searched` tokens.

    Example: with one token per character, stop `"ab"` and tokens `"xa" | "bc"` it is 3.
    """
    longest = max(map(len, stops), default=0)
    ends = range(max(seam, searched) + 1, min(len(token_ids), seam + longest) + 1)
    if longest < 2 or seam == 0 or not ends:
        return None
    first = max(0, seam - longest)  # a token has at least one character, or belongs to a token that has
    before = len(await decode(list(token_ids[first:seam])))
    for end in ends:
        text = await decode(list(token_ids[first:end]))
        if any(-1 < text.find(stop, max(0, before - len(stop) + 1)) < before for stop in stops):
            return end
    return None
