"""Decoupled PPO: the policy that bounds the update differs from the one that sampled."""

from __future__ import annotations

import torch

from inflight.config.checks import require
from inflight.trainer.objectives.base import Terms, TokenLoss, bounds_update, clip, prefers, ratio


def proximal(terms: Terms, how: str) -> torch.Tensor:
    """[B, L] log-probabilities of the proximal policy, without gradient. Raises ValueError for an unknown `how`."""
    if how not in ("recomputed", "interpolated"):
        raise ValueError(f"proximal={how!r} is not allowed: recomputed, interpolated")
    return terms.recomputed() if how == "recomputed" else terms.interpolated()


@bounds_update("clip_low", "clip_high", unless={"proximal_by": "interpolated"})
@prefers(normalise="token")
def decoupled_ppo(
    terms: Terms, *, clip_low: float = 0.2, clip_high: float = 0.2, proximal_by: str = "recomputed", cap: float = 0.0
) -> TokenLoss:
    """`loss = -(p_prox / p_behave) * min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A)`, `u = p / p_prox`
    (arXiv 2110.00641; for language models arXiv 2505.24298).

    The first factor, a constant, corrects for the behaviour policy; the clip bounds the size of this step's update.
    `proximal_by`: `recomputed` uses the weights before the step, which with one update per batch are those that are
    trained; `interpolated` is `Terms.interpolated`. Tokens whose first factor exceeds `cap` (0: none) are excluded.
    """
    require(cap >= 0, "cap", cap, "0 (none) or above")
    prox = proximal(terms, proximal_by)
    weight = ratio(prox - terms.behaviour)
    loss, binds = clip(ratio(terms.logprobs - prox), terms.advantages, clip_low, clip_high)
    beyond = weight > cap if cap > 0 else torch.zeros_like(terms.mask)
    return TokenLoss((weight * loss).masked_fill(beyond, 0.0), binds | beyond)
