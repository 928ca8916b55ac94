"""Masked importance sampling: tokens whose importance weight is out of bounds have no gradient."""

from __future__ import annotations

from inflight.trainer.objectives.base import Terms, TokenLoss, at_level, bounds_update, clip, outside, prefers, ratio


@bounds_update("clip_low", "clip_high")
@prefers(normalise="token")
def masked_is(
    terms: Terms,
    *,
    low: float = 0.0,
    high: float = 2.0,
    level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """`loss = -w * 1[low <= w <= high] * min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A)`,
    `w = p_prox / p_behave` a constant, `u = p / p_prox` (Liu et al. 2025, "When Speed Kills Stability", MIS).

    `level` selects the ratio that is compared with the bounds and used as `w`: `token`, `sequence` (the product) or
    `geometric`. A token out of bounds still counts in the normalisation.
    """
    prox = terms.recomputed()
    weight = ratio(at_level(prox - terms.behaviour, terms.mask, level))
    loss, binds = clip(ratio(terms.logprobs - prox), terms.advantages, clip_low, clip_high)
    beyond = outside(weight, low, high)
    return TokenLoss((weight * loss).masked_fill(beyond, 0.0), binds | beyond)


@bounds_update("clip_low", "clip_high")
@prefers(normalise="token")
def icepop(
    terms: Terms, *, low: float = 0.5, high: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> TokenLoss:
    """`masked_is` per token with two bounds (Ling team 2025, "Small Leak Can Sink a Great Ship", IcePop)."""
    return masked_is(terms, low=low, high=high, clip_low=clip_low, clip_high=clip_high)


@bounds_update("clip_low", "clip_high")
@prefers(normalise="token")
def sequence_mask(
    terms: Terms, *, low: float = 0.0, high: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> TokenLoss:
    """`masked_is` at level `sequence`: a sequence is trained on as a whole or not at all."""
    return masked_is(terms, low=low, high=high, level="sequence", clip_low=clip_low, clip_high=clip_high)


@bounds_update("clip_low", "clip_high")
@prefers(normalise="token")
def geometric_mask(
    terms: Terms, *, low: float = 0.99, high: float = 1.01, clip_low: float = 0.2, clip_high: float = 0.2
) -> TokenLoss:
    """A sequence takes part if the geometric mean of its ratios is within the bounds; the weight of a token is then its
    own ratio: `loss = -1[low <= exp(mean log w) <= high] * w * min(...)` (Liu et al. 2025, geometric rejection).

    Unlike the product, the mean does not grow with length.
    """
    prox = terms.recomputed()
    log_weight = prox - terms.behaviour
    loss, binds = clip(ratio(terms.logprobs - prox), terms.advantages, clip_low, clip_high)
    mean = ratio(at_level(log_weight, terms.mask, "geometric"))
    beyond = outside(mean, low, high)
    return TokenLoss((ratio(log_weight) * loss).masked_fill(beyond, 0.0), binds | beyond)
