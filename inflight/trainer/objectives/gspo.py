"""GSPO: ratio and clip of whole sequences."""

from __future__ import annotations

from inflight.trainer.objectives.base import Terms, TokenLoss, at_level, clip, prefers, ratio


@prefers(normalise="sequence")
def gspo(terms: Terms, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """`loss = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)`, `s = exp(mean_t log r_t)`, the geometric mean of
    a sequence's ratios (arXiv 2507.18071, eq. 5 and 7).

    Each token of a sequence carries the same loss, so with the normalisation `sequence` their mean is the paper's.
    """
    ratios = ratio(at_level(terms.log_ratio, terms.mask, "geometric"))
    return TokenLoss(*clip(ratios, terms.advantages, clip_low, clip_high))
