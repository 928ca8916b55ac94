"""REINFORCE: the policy gradient without any off-policy correction."""

from __future__ import annotations

import torch

from inflight.trainer.objectives.base import Terms, TokenLoss


def reinforce(terms: Terms) -> TokenLoss:
    """`loss = -A * log p` (Williams 1992). Unbiased for fresh tokens; the bias grows with their age."""
    return TokenLoss(-terms.advantages * terms.logprobs, torch.zeros_like(terms.mask))
