"""The input and output of an objective, and arithmetic that objectives share.

An objective is a function `(terms: Terms, *, options...) -> TokenLoss`, pure and per token. It does not normalise: each
sequence of a batch has a scale (`Batch.scales`), the weight of one of its tokens in the step, so that any split into
micro-batches and ranks adds up to the same. `@prefers(normalise=...)` names the normalisation that its paper uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from inflight.trainer.batch import Batch

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far beyond any clip, and still finite when multiplied and summed in float32."""

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """A micro-batch as an objective sees it: [B, L] each; 0 where a token is not trained on."""

    logprobs: torch.Tensor
    """float32, under the weights that are trained; carries the gradient."""
    behaviour: torch.Tensor
    """float32, recorded when the token was sampled."""
    proximal: torch.Tensor | None
    """float32, under the weights before the step's first update; None if these are the weights that are trained."""
    advantages: torch.Tensor
    """float32."""
    mask: torch.Tensor
    """bool, True where the token is trained on."""
    lags: torch.Tensor
    """int64, number of versions by which the token is behind the trainer."""

    @staticmethod
    def of(logprobs: torch.Tensor, batch: Batch, mask: torch.Tensor | None = None) -> Terms:
        """`mask` [B, L] replaces the batch's own. Masked values are replaced by 0 before anything is computed from
        them, so that they have exactly zero gradient, even where they are not finite."""
        mask = batch.trained_mask if mask is None else mask

        def only(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.masked_fill(~mask, 0)

        proximal = None if batch.proximal_logprobs is None else only(batch.proximal_logprobs)
        return Terms(
            logprobs=only(logprobs),
            behaviour=only(batch.behaviour_logprobs),
            proximal=proximal,
            advantages=only(batch.advantages),
            mask=mask,
            lags=only(batch.lags),
        )

    @property
    def log_ratio(self) -> torch.Tensor:
        """[B, L] `logprob now - logprob recorded`."""
        return self.logprobs - self.behaviour

    def recomputed(self) -> torch.Tensor:
        """[B, L] log-probabilities of the proximal policy, without gradient."""
        return self.logprobs.detach() if self.proximal is None else self.proximal

    def interpolated(self) -> torch.Tensor:
        """[B, L] the proximal policy's log-probabilities estimated from the versions, without a forward pass:

            log p_prox = log p_behave + alpha * (log p - log p_behave),  alpha = (v_prox - v_behave) / (v - v_behave)

        with `v_prox = v - 1`, so `alpha = (lag - 1) / lag`, and 0 at lag 0 (AReaL, "Proximal Log-Probability
        Approximation"; arXiv 2505.24298).
        """
        alpha = (self.lags - 1).clamp(min=0) / self.lags.clamp(min=1)
        return self.behaviour + alpha * self.log_ratio.detach()


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """The result of an objective for a micro-batch: [B, L] each; values outside the mask are not read."""

    loss: torch.Tensor
    """float32, to be minimised."""
    clipped: torch.Tensor
    """bool, True where a bound has set the token's gradient to zero or has replaced its ratio."""


def prefers(*, normalise: str) -> Callable[[F], F]:
    """Marks an objective with the normalisation (see `trainer.objective.normalise`) that it is defined with."""

    def mark(function: F) -> F:
        function.normalise = normalise  # type: ignore[attr-defined]
        return function

    return mark


def bounds_update(*options: str, unless: Mapping[str, object] | None = None) -> Callable[[F], F]:
    """Marks options of an objective that bound `u = p / p_prox`. With one update per batch `u` is 1 and they have no
    effect, `unless` another option has this value."""

    def mark(function: F) -> F:
        function.bounds_update = (options, unless or {})  # type: ignore[attr-defined]
        return function

    return mark


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, with a clamped argument so that it stays finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def at_level(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """[B, L] the log-ratio to compare with bounds; `log_ratio` must be 0 outside `mask`.
    `token`: its own; `sequence`: the sum over its sequence, whose exp is the ratio of the sequences' probabilities;
    `geometric`: the mean over its sequence. Raises ValueError for another level.
    """
    if level == "token":
        return log_ratio
    if level not in ("sequence", "geometric"):
        raise ValueError(f"level={level!r} is not allowed: token, sequence, geometric")
    whole = log_ratio.sum(dim=1, keepdim=True)
    if level == "geometric":
        whole = whole / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return whole.expand_as(log_ratio)


def outside(ratios: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """bool, True where a ratio is not within the bounds. Raises ValueError when no ratio could be."""
    if not 0 <= low < high:
        raise ValueError(f"low={low}, high={high} is not allowed: 0 or above, and low below high")
    return ~((ratios >= low) & (ratios <= high))  # NaN counts as outside


def clamp(ratios: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Clamps to [1 - low, 1 + high]. Raises ValueError for bounds on the wrong side of 1, or below 0."""
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"clip_low={low}, clip_high={high} is not allowed: 0 to 1, and 0 or above")
    return ratios.clamp(1 - low, 1 + high)


def clip(ratios: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)` and where the clip binds, [B, L] each."""
    bounded = clamp(ratios, low, high)
    binds = ((advantages > 0) & (ratios > bounded)) | ((advantages < 0) & (ratios < bounded))
    return -torch.minimum(ratios * advantages, bounded * advantages), binds.detach()
