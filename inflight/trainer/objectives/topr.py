"""TOPR: imitates positive samples; negative ones are weighted by a truncated ratio."""

from __future__ import annotations

import torch

from inflight.config.checks import require
from inflight.trainer.objectives.base import Terms, TokenLoss, at_level, prefers, ratio


@prefers(normalise="token")
def topr(terms: Terms, *, cap: float = 1.0, level: str = "sequence") -> TokenLoss:
    """`loss = -c * A * log p`, `c = 1` where `A >= 0`, else `sg(min(r, cap))`, `r = p / p_behave` of the sequence
    (Tapered Off-Policy REINFORCE, arXiv 2503.14286, with the bounds that the paper recommends).
    """
    require(cap > 0, "cap", cap, "above 0")
    ratios = ratio(at_level(terms.log_ratio.detach(), terms.mask, level))
    negative = terms.advantages < 0
    weight = torch.where(negative, ratios.clamp(max=cap), torch.ones_like(ratios))
    return TokenLoss(-weight * terms.advantages * terms.logprobs, negative & (ratios > cap))
