"""Whether the kept sets of a record are ones that the run's sampling options could have left.

A replay takes the kept set of a token from the record: rounding may put another token at the edge of a truncation than
the generator had there. A set that rounding does not explain is not used, else a record could choose its own
log-probabilities: those of a set of one token are all 0.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from inflight.config import Sampling
from inflight.sampling import Recorded


def plausible(logits: torch.Tensor, sampling: Sampling, recorded: Recorded, slack: float) -> Recorded:
    """The record of N draws without the kept sets that do not fit [N, V] logits, before temperature.

    `slack`: by how many nats rounding may move a logit, in the sampled distribution.
    """
    if recorded.kept is None:
        return recorded
    surely, maybe = _edges(logits.float() / sampling.temperature, sampling, slack)
    known = recorded.kept >= 0  # [N, K]
    ids = torch.where(known, recorded.kept, recorded.chosen[:, None])
    kept = torch.zeros_like(maybe).scatter(1, ids, True)
    maybe = maybe.scatter(1, recorded.chosen[:, None], True)
    fits = ~((surely & ~kept) | (kept & ~maybe)).any(dim=1, keepdim=True)
    return replace(recorded, kept=torch.where(fits, recorded.kept, -1))


def _edges(logits: torch.Tensor, sampling: Sampling, slack: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, V] tokens that are kept for certain, and those that may be kept: min-p, then top-k, then top-p, as in
    sampling.py."""
    surely = maybe = torch.ones_like(logits, dtype=torch.bool)
    if sampling.min_p > 0:
        least = logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        surely = logits >= least + slack
        maybe = logits >= least - slack
    if 0 < sampling.top_k < logits.shape[-1]:
        last = logits.masked_fill(~surely, -math.inf).topk(sampling.top_k, dim=-1).values[:, -1:]
        first_out = logits.masked_fill(~maybe, -math.inf).topk(sampling.top_k + 1, dim=-1).values[:, -1:]
        surely = surely & (logits > first_out + slack)
        maybe = maybe & (logits >= last - slack)
    if sampling.top_p < 1:
        probabilities = logits.softmax(dim=-1)
        sure, possible = (torch.where(left, probabilities, 0.0) for left in (surely, maybe))
        ascending, order = logits.sort(dim=-1)
        most = _mass_above(logits, ascending, order, possible, -slack)
        most = most / sure.sum(dim=-1, keepdim=True).clamp(min=1e-30)
        least = _mass_above(logits, ascending, order, sure, slack) / possible.sum(dim=-1, keepdim=True)
        surely = surely & (most < sampling.top_p - slack)
        maybe = maybe & (least < sampling.top_p + slack)
    return surely, maybe


def _mass_above(
    logits: torch.Tensor, ascending: torch.Tensor, order: torch.Tensor, probabilities: torch.Tensor, by: float
) -> torch.Tensor:
    """[N, V] probability of the tokens whose logit is above a token's by more than `by`, without the token; `ascending`
    are the sorted logits, of the tokens `order`."""
    upto = probabilities.gather(1, order).double().cumsum(dim=-1)
    first = torch.searchsorted(ascending, (logits + by).contiguous(), right=True)  # the first above
    below = torch.where(first > 0, upto.gather(1, (first - 1).clamp(min=0)), 0.0)
    above = upto[:, -1:] - below
    return (above - probabilities if by < 0 else above).clamp(min=0.0)
