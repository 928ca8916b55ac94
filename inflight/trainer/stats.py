"""Statistics of a step's tokens by lag: sums that are added over micro-batches and ranks.

The row of lag 0 is the noise floor: both sides have the same weights, so that the log-ratio shows the difference
between two implementations. What rows of higher lag show beyond it is staleness.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inflight.trainer.batch import Batch
from inflight.trainer.objectives.base import Terms, ratio

LAGS = 64
"""Lags 0 to 62 have a row each; the last holds 63 and more."""
TAIL = math.log(2)
"""Log-ratios beyond it, up or down, count as the tail: the probability has doubled or halved."""
COLUMNS = (
    "tokens",
    "gated",
    "log_ratio",
    "log_ratio_squared",
    "log_ratio_size",
    "tail",
    "weight",
    "weight_squared",
    "kl",
    "clipped",
    "entropy",
    "drift",
)


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """Sums over sampled tokens; all but `gated` over those trained on. `log_ratio = logprob - logprob recorded`, the
    former under the weights before the batch's first update: later updates give the same, and lag 0 stays the
    noise floor."""

    sums: torch.Tensor
    """[LAGS, COLUMNS] float64."""
    largest: torch.Tensor
    """[LAGS] float64, largest absolute log-ratio."""
    gated_by: dict[str, int] = field(default_factory=dict)
    """Number of tokens that each rule on log-ratios has masked; included in `gated`."""

    @property
    def tokens(self) -> int:
        """Number of tokens trained on."""
        return int(self.sums[:, 0].sum())

    def whole(self) -> dict[str, float]:
        """The figures over all lags."""
        return row(self.sums.sum(dim=0), float(self.largest.max()))

    def values(self) -> dict[str, Any]:
        """For metrics: the whole step's figures, and `by_lag`, the same for each lag that occurred."""
        whole = self.whole()
        seen = [lag for lag in range(LAGS) if float(self.sums[lag, :2].sum()) > 0]
        by_lag = {str(lag): row(self.sums[lag], float(self.largest[lag])) for lag in seen}
        kept = ("log_ratio_mean", "log_ratio_std", "log_ratio_max", "tail_share", "ess", "kl", "clip_share", "entropy")
        counts = {"by_lag": by_lag, "tokens_masked_by_ratio": self.gated_by}
        return {name: whole[name] for name in kept} | counts


def row(sums: torch.Tensor, largest: float) -> dict[str, float]:
    """Figures of one lag, or of all, from their sums [COLUMNS].

    `ess` is the effective sample size as a share of the tokens, `(sum w)^2 / (n sum w^2)`; `kl` estimates
    KL(recorded || now) by `w - 1 - log w`; `gated` counts sampled tokens that were not trained on; `drift` is how far
    the batch's updates have moved the policy, `|log p - log p_prox|`.
    """
    of = dict(zip(COLUMNS, sums.tolist(), strict=True))
    n = max(of["tokens"], 1.0)
    mean = of["log_ratio"] / n
    return {
        "tokens": of["tokens"],
        "gated": of["gated"],
        "log_ratio_mean": mean,
        "log_ratio_std": math.sqrt(max(of["log_ratio_squared"] / n - mean * mean, 0.0)),
        "log_ratio_size": of["log_ratio_size"] / n,
        "log_ratio_max": largest,
        "tail_share": of["tail"] / n,
        "weight_mean": of["weight"] / n,
        "ess": of["weight"] ** 2 / (n * of["weight_squared"]) if of["weight_squared"] else 0.0,
        "kl": of["kl"] / n,
        "clip_share": of["clipped"] / n,
        "entropy": of["entropy"] / n,
        "drift": of["drift"] / n,
    }


def combine(parts: Sequence[Stats]) -> Stats:
    """Combines the stats of several micro-batches or ranks."""
    return Stats(
        sums=torch.stack([part.sums for part in parts]).sum(dim=0),
        largest=torch.stack([part.largest for part in parts]).amax(dim=0),
        gated_by=dict(sum((Counter(part.gated_by) for part in parts), Counter())),
    )


def measure(
    terms: Terms, batch: Batch, clipped: torch.Tensor, entropy: torch.Tensor, gated_by: dict[str, int]
) -> Stats:
    """The stats of one micro-batch; `clipped` and `entropy` are [B, L]. On the CPU."""
    mask = terms.mask
    start = terms.recomputed()
    log_ratio = (start - terms.behaviour)[mask].double()
    drift = (terms.logprobs.detach() - start)[mask].double().abs()
    weight = ratio(log_ratio)
    gated = batch.completion_mask & ~mask & (batch.scales > 0)[:, None]  # a rank without data repeats a sequence
    columns = (
        torch.ones_like(log_ratio),
        torch.zeros_like(log_ratio),
        log_ratio,
        log_ratio**2,
        log_ratio.abs(),
        (log_ratio.abs() > TAIL).double(),
        weight,
        weight**2,
        weight - 1 - log_ratio,
        clipped[mask].double(),
        entropy[mask].double(),
        drift,
    )
    lags = batch.lags[mask].clamp(0, LAGS - 1)
    sums = log_ratio.new_zeros(LAGS, len(COLUMNS)).index_add_(0, lags, torch.stack(columns, dim=1))
    sums[:, 1] = torch.bincount(batch.lags[gated].clamp(0, LAGS - 1), minlength=LAGS)
    largest = log_ratio.new_zeros(LAGS).scatter_reduce_(0, lags, log_ratio.abs(), "amax")
    return Stats(sums.cpu(), largest.cpu(), gated_by)
