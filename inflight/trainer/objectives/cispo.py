"""CISPO: the ratio is clipped, the gradient is not."""

from __future__ import annotations

from inflight.trainer.objectives.base import Terms, TokenLoss, clamp, prefers, ratio


@prefers(normalise="token")
def cispo(terms: Terms, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """`loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log p`, `r = p / p_behave`, sg: no gradient
    (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    PPO's clip drops the gradient of the rare tokens that a step changes most; here they keep a gradient with a bounded
    weight. `clip_low=1` is no lower bound, as in the paper.
    """
    ratios = ratio(terms.log_ratio.detach())
    weight = clamp(ratios, clip_low, clip_high)
    return TokenLoss(-weight * terms.advantages * terms.logprobs, weight != ratios)
