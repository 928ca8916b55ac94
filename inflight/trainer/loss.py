"""The loss of a micro-batch: the objective, a KL divergence, an entropy bonus. Pure functions of tensors.

A loss is a sum in which each token has its share of the whole step (`Batch.scales`), never a mean over the
micro-batch: micro-batches and ranks add up to the same loss and gradient, however the step is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inflight.config import ConfigError, RunConfig
from inflight.named import find, with_options
from inflight.trainer.batch import Batch
from inflight.trainer.logprobs import Scores
from inflight.trainer.objectives import OBJECTIVES
from inflight.trainer.objectives.base import MAX_LOG_RATIO, Terms, TokenLoss, ratio
from inflight.trainer.ratio_rules import RatioRule, ratio_rules_of
from inflight.trainer.stats import Stats, measure


@dataclass(frozen=True)
class Loss:
    """The loss of a run; made once from its configuration."""

    objective: Callable[[Terms], TokenLoss]
    normalise: str
    kl: float = 0.0
    kl_cap: float = 0.0
    """Cap of the weights that correct the divergence's gradient on stale tokens; 0: no weights."""
    kl_estimator: str = "k3"
    entropy: float = 0.0
    ratio_rules: Sequence[tuple[str, RatioRule]] = ()
    """The gate's rules on log-ratios."""

    def __call__(
        self, scores: Scores, batch: Batch, reference: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stats]:
        """The micro-batch's share of the step's loss, a float32 scalar, and its figures.

        `scores` carries the gradient; `reference` [B, L] are the log-probabilities that `kl` is measured from. Only
        trained tokens are read, so a masked one has exactly zero gradient, even where it is not finite.
        """
        mask, gated_by = self._gate(scores.logprobs, batch)
        terms = Terms.of(scores.logprobs, batch, mask)
        result = self.objective(terms)
        per_token = result.loss
        if self.kl:
            if reference is None:
                raise ValueError("trainer.objective.kl needs a reference: this batch has none")
            per_token = per_token + self.kl * self._divergence(terms, reference.masked_fill(~terms.mask, 0))
        if self.entropy:
            per_token = per_token - self.entropy * scores.entropy.masked_fill(~terms.mask, 0)
        loss = (per_token.masked_fill(~terms.mask, 0) * batch.scales[:, None]).sum()
        with torch.no_grad():
            return loss, measure(terms, batch, result.clipped, scores.entropy, gated_by)

    def _divergence(self, terms: Terms, reference: torch.Tensor) -> torch.Tensor:
        if not self.kl_cap:
            return kl(terms.logprobs, reference, self.kl_estimator)
        return weighted_kl(terms, reference, self.kl_estimator, self.kl_cap)

    @torch.no_grad()
    def _gate(self, logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, int]]:
        """[B, L] the tokens that remain after the rules on log-ratios, and how many tokens each rule has masked.

        Rules use the weights before the batch's first update: a token takes part in all updates, or in none.
        """
        if batch.proximal_logprobs is not None:
            logprobs = batch.proximal_logprobs
        mask = batch.trained_mask
        counts = Counter[str]()
        for name, rule in self.ratio_rules:
            log_ratio = (logprobs - batch.behaviour_logprobs).masked_fill(~mask, 0)
            kept = mask & rule(log_ratio, mask)
            counts[name] += int(mask.sum() - kept.sum())  # a rule may be configured twice
            mask = kept
        return mask, dict(counts)


def make_loss(config: RunConfig) -> Loss:
    """The loss of a run, tried once on dummy tokens.

    Raises ConfigError that names an unknown objective or option, or one that fails.
    """
    settings = config.trainer.objective
    place = "trainer.objective"
    function = find(settings.name, OBJECTIVES, f"{place}.name")
    objective = with_options(function, settings.options, f"{place}.options")
    _try(objective, settings.name)  # first: an invalid value is the more specific error
    if config.trainer.updates == 1:
        _require_bound(function, settings.options, f"{place}.options")
    return Loss(
        objective=objective,
        normalise=settings.normalise or getattr(function, "normalise", "token"),
        kl=settings.kl,
        kl_cap=settings.kl_cap,
        kl_estimator=settings.kl_estimator,
        entropy=settings.entropy,
        ratio_rules=ratio_rules_of(config.gate.ratio_rules),
    )


def kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """[B, L] one-sample estimates of KL(p || reference) at tokens that p has sampled, `d = log reference - log p`
    (Schulman 2020, "Approximating KL Divergence"):

        k1 = -d            unbiased; its own gradient is zero in expectation
        k2 = d^2 / 2       biased value, correct gradient
        k3 = exp(d) - d - 1    unbiased, never negative: GRPO's

    `d` is clamped to keep exp finite. Raises ValueError for another name.
    """
    d = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return d.exp() - d - 1
    raise ValueError(f"kl_estimator={estimator!r} is not allowed: k1, k2, k3")


def weighted_kl(terms: Terms, reference: torch.Tensor, estimator: str, cap: float) -> torch.Tensor:
    """[B, L] estimates of KL(p || reference) at tokens that another policy has sampled, each weighted by
    `w = min(p / p_behave, cap)`, with the gradient `w (log p - log reference) grad log p`.

    Below the cap its mean and its gradient are those of the divergence for k1 and k3, whatever the sampling policy: it
    is the unbiased estimate of DeepSeek-V3.2 (arXiv 2512.02556), `r k3` with the gradient through `r` as well, token by
    token; k2 has a biased value, as on fresh tokens. Without weights the gradient of k3 is that of KL(reference || p),
    and that of k1 is zero.
    """
    weight = ratio(terms.log_ratio.detach()).clamp(max=cap)
    toward = kl(terms.logprobs, reference, "k2")  # its gradient is (log p - log reference) grad log p
    return weight * (kl(terms.logprobs, reference, estimator).detach() + toward - toward.detach())


def _require_bound(function: Callable[..., TokenLoss], options: Mapping[str, Any], place: str) -> None:
    """Raises ConfigError for an option that was set and bounds a ratio which is always 1 with one update per batch."""
    names, unless = getattr(function, "bounds_update", ((), {}))
    if any(options.get(key) == value for key, value in unless.items()):
        return
    for name in names:
        if name in options:
            raise ConfigError(
                f"{place}.{name} is set and has no effect: it bounds p / p_prox, which is 1 with one update per batch"
                " (trainer.updates_per_batch, trainer.epochs_per_batch)"
            )


def _try(objective: Callable[[Terms], TokenLoss], name: str) -> None:
    shape = (2, 3)  # not square, and no dimension is 1, so that another shape is noticed
    zeros = torch.zeros(shape)
    terms = Terms(zeros, zeros, None, zeros, zeros == 0, torch.zeros(shape, dtype=torch.int64))
    try:
        result = objective(terms)
    except Exception as error:  # noqa: BLE001 - an objective may be foreign code
        raise ConfigError(f"trainer.objective {name}: {error}") from None
    if not isinstance(result, TokenLoss) or result.loss.shape != shape or result.clipped.shape != shape:
        raise ConfigError(f"trainer.objective {name} does not return a TokenLoss of the shape of its input")
