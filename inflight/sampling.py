"""The distribution that a token is sampled from: computed from a model's logits as vLLM does, in the same order.

Penalties, temperature, min-p, top-k, top-p; then the log-probabilities of the remaining tokens. A trainer that compares
with recorded log-probabilities has to compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inflight.config import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The recorded data of N draws, in addition to the logits."""

    chosen: torch.Tensor
    """[N] int64, the sampled tokens: they were possible, whatever rounding says at the edge of a truncation."""
    kept: torch.Tensor | None = None
    """[N, K] int64, the tokens that remained to sample from, padded with -1; a row of -1 was not recorded."""
    seen: torch.Tensor | None = None
    """[N, U] int64, the preceding tokens without repetition; needed for penalties. Padding with any token, including 0,
    has no effect if the two fields below are zero for it."""
    in_prompt: torch.Tensor | None = None
    """[N, U] bool, whether the token occurs in the prompt."""
    drawn_before: torch.Tensor | None = None
    """[N, U] integers, how often the token was sampled before."""


def processed_logprobs(logits: torch.Tensor, sampling: Sampling, recorded: Recorded | None = None) -> torch.Tensor:
    """[N, V] log-probabilities of vLLM's sampling distribution, in float32 (float64 for logits in float64); excluded
    tokens get minus infinity.

    Where the kept set was recorded it is used: the generator's, not the one of these weights. Elsewhere it is computed:
    top-k keeps ties of the k-th; top-p keeps the smallest set of most probable tokens whose mass exceeds p, at least
    one (vllm/v1/sample/ops/topk_topp_sampler.py).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.penalises:
        logits = _penalised(logits, sampling, recorded)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature  # two more passes over N x V, forward and backward
    cut = _cut(logits.detach(), sampling)
    if cut is None:
        return logits.log_softmax(dim=-1)
    if recorded is not None:
        cut = _as_recorded(cut, recorded)
    return logits.masked_fill(cut, float("-inf")).log_softmax(dim=-1)


def _penalised(logits: torch.Tensor, sampling: Sampling, recorded: Recorded | None) -> torch.Tensor:
    """Repetition divides positive logits and multiplies negative ones, the others subtract (vLLM, as OpenAI)."""
    if recorded is None or recorded.seen is None or recorded.in_prompt is None or recorded.drawn_before is None:
        raise ValueError("penalties need to know which tokens came before")
    plain = logits.gather(1, recorded.seen)
    drawn = recorded.drawn_before > 0
    factor = torch.where(recorded.in_prompt | drawn, sampling.repetition_penalty, 1.0)
    changed = torch.where(plain > 0, plain / factor, plain * factor)
    changed = changed - sampling.frequency_penalty * recorded.drawn_before - sampling.presence_penalty * drawn
    return logits.scatter_add(1, recorded.seen, changed - plain)  # a repeated token changes once, and by 0 after that


def _cut(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """[N, V] True where a token can't be sampled; None when all can."""
    if sampling.min_p <= 0 and sampling.top_p >= 1 and not 0 < sampling.top_k < logits.shape[-1]:
        return None
    out = torch.zeros_like(logits, dtype=torch.bool)
    if sampling.min_p > 0:
        probabilities = logits.softmax(dim=-1)
        out |= probabilities < sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
    if 0 < sampling.top_k < logits.shape[-1]:
        left = logits.masked_fill(out, float("-inf"))
        out |= left < left.topk(sampling.top_k, dim=-1).values[:, -1:]
    if sampling.top_p < 1:
        ascending, order = logits.masked_fill(out, float("-inf")).sort(dim=-1, stable=True)
        rare = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        rare[:, -1] = False
        out |= torch.zeros_like(rare).scatter(1, order, rare)
    return out


def _as_recorded(cut: torch.Tensor, recorded: Recorded) -> torch.Tensor:
    """Replaces the mask by recorded sets where there are any; sampled tokens are never excluded."""
    if recorded.kept is not None:
        known = recorded.kept >= 0  # [N, K]
        ids = torch.where(known, recorded.kept, recorded.chosen[:, None])
        outside = torch.ones_like(cut).scatter(1, ids, False)
        cut = torch.where(known.any(dim=1, keepdim=True), outside, cut)
    return cut.scatter(1, recorded.chosen[:, None], False)
