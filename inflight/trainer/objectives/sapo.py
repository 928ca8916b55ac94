"""SAPO: a soft gate in place of the hard clip."""

from __future__ import annotations

import torch

from inflight.config.checks import require
from inflight.trainer.objectives.base import Terms, TokenLoss, prefers, ratio


@prefers(normalise="sequence")
def sapo(terms: Terms, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> TokenLoss:
    """`loss = -(4 / tau) * sigmoid(tau * (r - 1)) * A`, `r = p / p_behave`, tau by the sign of A (arXiv 2511.20347).

    At r = 1 the slope in r is 1, as PPO's; it decays smoothly to both sides instead of being cut off.
    """
    require(temperature_positive > 0, "temperature_positive", temperature_positive, "above 0")
    require(temperature_negative > 0, "temperature_negative", temperature_negative, "above 0")
    ratios = ratio(terms.log_ratio)
    tau = torch.where(terms.advantages > 0, temperature_positive, temperature_negative)
    return TokenLoss(-torch.sigmoid(tau * (ratios - 1)) * 4 / tau * terms.advantages, torch.zeros_like(terms.mask))
