"""Truncated importance sampling: the importance weight is bounded from above."""

from __future__ import annotations

from inflight.config.checks import require
from inflight.trainer.objectives.base import Terms, TokenLoss, at_level, bounds_update, clip, prefers, ratio


@bounds_update("clip_low", "clip_high")
@prefers(normalise="token")
def tis(
    terms: Terms, *, cap: float = 2.0, level: str = "token", clip_low: float = 0.2, clip_high: float = 0.2
) -> TokenLoss:
    """`loss = -min(w, cap) * min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A)`, `w = p_prox / p_behave` a constant,
    `u = p / p_prox` (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").

    `level`: `token` bounds each token's weight; `sequence` the product over its sequence, which all its tokens share;
    `geometric` the geometric mean. Biased where the cap binds, of bounded variance everywhere.
    """
    require(cap > 0, "cap", cap, "above 0")
    prox = terms.recomputed()
    weight = ratio(at_level(prox - terms.behaviour, terms.mask, level))
    loss, binds = clip(ratio(terms.logprobs - prox), terms.advantages, clip_low, clip_high)
    return TokenLoss(weight.clamp(max=cap) * loss, binds | (weight > cap))


@bounds_update("clip_low", "clip_high")
@prefers(normalise="token")
def tis_sequence(terms: Terms, *, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """`tis` at level `sequence`."""
    return tis(terms, cap=cap, level="sequence", clip_low=clip_low, clip_high=clip_high)
