"""The objective: what the log-probabilities of a micro-batch are worth. Pure functions of tensors.

An objective is `(logprobs [B, L], batch, config) -> (loss_sum, Stats)`: a sum over trained tokens, never a mean, so
that the caller divides by the trained tokens of the whole step and micro-batches of any size add up to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.config import TrainerConfig
from inflight.trainer.batch import Batch

LAG_BUCKETS = 9
"""Lags 0 to 7 have a bucket each; the last holds 8 and more."""
MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far beyond any clip, and still finite when multiplied and summed in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """What happened in a micro-batch, over its trained tokens; `log_ratio = logprob now - logprob recorded`."""

    tokens: int
    log_ratio_sum: float
    log_ratio_max: float
    """Largest absolute value."""
    clipped: int
    """Tokens whose gradient the clip has set to zero."""
    lag_tokens: torch.Tensor
    """[LAG_BUCKETS] tokens."""
    lag_log_ratio: torch.Tensor
    """[LAG_BUCKETS] sum of absolute log ratios."""

    def values(self) -> dict[str, float | dict[str, float]]:
        """For metrics: means over tokens; `log_ratio_by_lag` holds the mean absolute log ratio of each bucket."""
        counts, sums = self.lag_tokens.tolist(), self.lag_log_ratio.tolist()
        return {
            "log_ratio_mean": self.log_ratio_sum / max(self.tokens, 1),
            "log_ratio_max": self.log_ratio_max,
            "clip_share": self.clipped / max(self.tokens, 1),
            "log_ratio_by_lag": {str(lag): sums[lag] / count for lag, count in enumerate(counts) if count},
        }


def combine(parts: Sequence[Stats]) -> Stats:
    """The stats of several micro-batches as one."""
    return Stats(
        tokens=sum(part.tokens for part in parts),
        log_ratio_sum=sum(part.log_ratio_sum for part in parts),
        log_ratio_max=max(part.log_ratio_max for part in parts),
        clipped=sum(part.clipped for part in parts),
        lag_tokens=torch.stack([part.lag_tokens for part in parts]).sum(dim=0),
        lag_log_ratio=torch.stack([part.lag_log_ratio for part in parts]).sum(dim=0),
    )


def objective(logprobs: torch.Tensor, batch: Batch, config: TrainerConfig) -> tuple[torch.Tensor, Stats]:
    """PPO's clipped objective (arXiv 1707.06347, equation 7) per token, against what the generator recorded:

        ratio = exp(logprob - behaviour_logprob)
        loss  = -sum min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    `logprobs` [B, L] carries the gradient. Only trained tokens are read, so a masked one has exactly no gradient, even
    where its log-probability is not finite. The ratio mends a token's age and the difference between the two
    implementations alike.
    """
    log_ratio = logprobs[batch.trained_mask] - batch.behaviour_logprobs[batch.trained_mask]  # [N]
    advantages = batch.advantages[:, None].expand_as(logprobs)[batch.trained_mask]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_sum = -torch.minimum(ratio * advantages, clipped_ratio * advantages).sum()
    with torch.no_grad():
        binds = ((advantages > 0) & (ratio > clipped_ratio)) | ((advantages < 0) & (ratio < clipped_ratio))
        return loss_sum, _stats(log_ratio, binds, batch.lags[batch.trained_mask])


def _stats(log_ratio: torch.Tensor, binds: torch.Tensor, lags: torch.Tensor) -> Stats:
    buckets = lags.clamp(max=LAG_BUCKETS - 1)
    size = log_ratio.abs().double()
    return Stats(
        tokens=log_ratio.numel(),
        log_ratio_sum=float(log_ratio.double().sum()),
        log_ratio_max=float(size.max()) if size.numel() else 0.0,
        clipped=int(binds.sum()),
        lag_tokens=torch.bincount(buckets, minlength=LAG_BUCKETS).cpu(),
        lag_log_ratio=torch.bincount(buckets, weights=size, minlength=LAG_BUCKETS).cpu(),
    )
