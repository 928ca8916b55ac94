"""REINFORCE: the policy gradient without any correction for age."""

from __future__ import annotations

import torch

from inflight.trainer.objectives.base import Terms, TokenLoss


def reinforce(terms: Terms) -> TokenLoss:
    """`loss = -A * log p` (Williams 1992). Right for fresh tokens; the older they are, the more it is biased."""
    return TokenLoss(-terms.advantages * terms.logprobs, torch.zeros_like(terms.mask))
