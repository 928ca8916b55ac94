"""Decides which hypothesis fits the record: the tags, or an alternative.

Let r0 be a token's log-probability in the replay under the tags, r1 under the alternative, and x the recorded one. Both
replays are exact (float32), so all noise is in x: the engine's rounding. Then

    x - r0 = slope * (r1 - r0) + noise

has slope 0 when the tags are right and slope 1 when the alternative is. Least squares over all tokens for which the two
hypotheses differ estimates it, with weights by how little tokens of their confidence miss. Its standard error is the
jackknife's over prompts: the tokens of one depend on each other (its samples share contexts, which an engine rounds
equally), and an estimate that depends on a few prompts gets the large error that it deserves. The noise may be far
larger than what a version changes in a single token: that only requires more tokens. Tokens for which the hypotheses do
not differ have no weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

STANDARD_ERRORS = 4.0
"""Distance from the middle between the hypotheses, in standard errors, at which an estimate counts: chance exceeds it
once in 30,000 times, and an audit makes some hundred estimates (alternatives by versions)."""
MIN_PROMPTS = 20
"""With fewer, their spread is unknown."""
MAX_SHARE = 0.5
"""When one prompt has a larger share of the evidence, the spread of all prompts does not describe it."""
MIN_NOISE = 0.02
"""Fraction of the overall size of misses: the least noise assumed for a token, however sure the model is of it."""
EXCESS_LIMIT = 1.5
LEAST_SHARE = 0.8
"""Share of tokens that must come out bit for bit alike when the replay's kernels are the engine's. Measured: 99.9 % in
a sound engine (94 % if sequences were often alone, with other kernels); 8 to 53 % with a fault (docs/audit.md)."""
CONFIDENCE_BINS = 8
UNSURE = 1e-3
"""Nats below 0 at which the model counts as not sure of a token."""


class Verdict(StrEnum):
    """The result of an estimate."""

    TAGS = "ruled out"
    ALTERNATIVE = "fits better than the tags"
    UNDECIDED = "undecided"


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """0 when the tags are right, 1 when the alternative is."""

    slope: float
    error: float
    """Standard error."""
    tokens: int
    """Number of tokens for which the hypotheses differ."""
    fits: bool = True
    """Whether the record fits the tags at all: if it does not, it rules nothing out."""

    @property
    def verdict(self) -> Verdict:
        """By the side of 1/2 on which the estimate certainly is."""
        if not math.isfinite(self.error) or abs(self.slope - 0.5) <= STANDARD_ERRORS * self.error:
            return Verdict.UNDECIDED
        if self.slope < 0.5:
            return Verdict.TAGS if self.fits else Verdict.UNDECIDED
        return Verdict.ALTERNATIVE


def estimate(recorded: np.ndarray, tags: np.ndarray, alternative: np.ndarray, prompt: np.ndarray) -> Slope:
    """All [N] float64; `prompt` [N] int: index of the prompt of a token's sequence."""
    difference = alternative - tags
    miss = recorded - tags
    telling = np.isfinite(difference) & np.isfinite(miss) & (difference != 0)
    difference = difference[telling]
    miss = miss[telling]
    prompt = prompt[telling]
    weights = _precision(tags[telling], miss)
    difference = difference * weights
    miss = miss * weights
    weight = float(difference @ difference)
    if weight == 0 or len(np.unique(prompt)) < MIN_PROMPTS:
        return Slope(slope=0.0, error=math.inf, tokens=int(telling.sum()))
    slope = float(difference @ miss) / weight
    share = _sums(difference**2, prompt) / weight  # of the evidence, by prompt
    if share.max() > MAX_SHARE:
        return Slope(slope=slope, error=math.inf, tokens=int(telling.sum()))
    shifts = _sums(difference * (miss - slope * difference), prompt) / (1 - share) / weight
    error = math.sqrt(float(shifts @ shifts) * (len(shifts) - 1) / len(shifts))
    return Slope(slope=slope, error=error, tokens=int(telling.sum()))


def vote(recorded: np.ndarray, tags: np.ndarray, alternative: np.ndarray, prompt: np.ndarray) -> Slope:
    """As `estimate`, for almost no noise (float32, or a replay that rounds as the engine did).

    The share of tokens closer to the alternative, among those for which the hypotheses differ.
    """
    telling = np.isfinite(alternative) & np.isfinite(tags) & np.isfinite(recorded) & (alternative != tags)
    to_tags = np.abs(recorded - tags)[telling]
    to_alternative = np.abs(recorded - alternative)[telling]
    votes = np.where(to_tags == to_alternative, 0.5, to_alternative < to_tags)
    if len(np.unique(prompt[telling])) < MIN_PROMPTS:
        return Slope(slope=float(votes.mean()) if len(votes) else 0.0, error=math.inf, tokens=len(votes))
    error = _cluster_error(votes - votes.mean(), prompt[telling]) / len(votes)
    return Slope(slope=float(votes.mean()), error=error, tokens=len(votes))


@dataclass(frozen=True, slots=True)
class Misses:
    """Tokens with the size of their differences."""

    size: np.ndarray
    """[N] float64, absolute differences."""
    recorded: np.ndarray
    """[N] float64, recorded log-probabilities."""
    prompt: np.ndarray
    """[N] int, index of the prompt of a token's sequence."""

    @property
    def prompts(self) -> int:
        """Number of prompts that have a token here."""
        return len(np.unique(self.prompt))


def _precision(replayed: np.ndarray, miss: np.ndarray) -> np.ndarray:
    """[N] one by the size of misses among tokens of similar probability; improbable ones miss far more."""
    overall = math.sqrt(float(miss @ miss) / max(len(miss), 1))
    if overall == 0:
        return np.ones_like(miss)
    edges = np.quantile(replayed, np.linspace(0, 1, CONFIDENCE_BINS + 1)[1:-1])
    bins = np.searchsorted(edges, replayed)
    counts = np.bincount(bins, minlength=CONFIDENCE_BINS)
    sizes = np.sqrt(np.bincount(bins, weights=miss**2, minlength=CONFIDENCE_BINS) / np.maximum(counts, 1))
    weights: np.ndarray = overall / np.maximum(sizes, MIN_NOISE * overall)[bins]
    return weights


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Share of tokens whose log-probability the replay reproduces bit for bit."""

    share: float
    error: float
    """Standard error, over prompts."""

    @property
    def suspicious(self) -> bool:
        """Whether it is certainly below LEAST_SHARE; with fewer than MIN_PROMPTS prompts the plain share decides."""
        error = self.error if math.isfinite(self.error) else 0.0
        return self.share + STANDARD_ERRORS * error < LEAST_SHARE


def same_share(tokens: Misses) -> Share:
    """Uses tokens that the model is not sure of: a probability that rounds to 1 is 1 under the wrong weights too."""
    unsure = tokens.recorded < -UNSURE
    same = (tokens.size[unsure] == 0).astype(float)
    prompt = tokens.prompt[unsure]
    if len(np.unique(prompt)) < MIN_PROMPTS:
        return Share(share=float(same.mean()) if len(same) else 1.0, error=math.inf)
    return Share(share=float(same.mean()), error=_cluster_error(same - same.mean(), prompt) / len(same))


class Excess(msgspec.Struct, frozen=True, kw_only=True):
    """How much larger misses are than before any swap could go wrong; 1 when they are alike."""

    ratio: float
    error: float
    """Standard error."""

    @property
    def suspicious(self) -> bool:
        """Whether the ratio is certainly above EXCESS_LIMIT."""
        return math.isfinite(self.error) and self.ratio - STANDARD_ERRORS * self.error > EXCESS_LIMIT


def excess(tokens: Misses, baseline: Misses) -> Excess:
    """Misses of `tokens` compared with the baseline's at the same confidence.

    An engine's rounding shows more in improbable tokens, and training makes a model more confident, so tokens are
    compared with those of the baseline that have a similar recorded log-probability (CONFIDENCE_BINS quantiles).
    """
    if min(tokens.prompts, baseline.prompts) < MIN_PROMPTS or baseline.size.sum() == 0:
        return Excess(ratio=1.0, error=math.inf)
    edges = np.quantile(baseline.recorded, np.linspace(0, 1, CONFIDENCE_BINS + 1)[1:-1])
    bins = np.searchsorted(edges, baseline.recorded)
    counts = np.bincount(bins, minlength=CONFIDENCE_BINS)
    sums = np.bincount(bins, weights=baseline.size, minlength=CONFIDENCE_BINS)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), baseline.size.mean())
    ratio, error = _ratio(tokens, means[np.searchsorted(edges, tokens.recorded)])
    _, own_error = _ratio(baseline, means[bins])
    return Excess(ratio=ratio, error=math.hypot(error, ratio * own_error))


def _ratio(tokens: Misses, expected: np.ndarray) -> tuple[float, float]:
    """Sum of sizes by sum of expected ones, and its error over prompts."""
    total = float(expected.sum())
    ratio = float(tokens.size.sum()) / total
    return ratio, _cluster_error(tokens.size - ratio * expected, tokens.prompt) / total


def _cluster_error(values: np.ndarray, prompt: np.ndarray) -> float:
    """Standard error of a sum of values with mean 0 that are dependent within a prompt."""
    sums = _sums(values, prompt)
    return math.sqrt(float(sums @ sums) * len(sums) / (len(sums) - 1))


def _sums(values: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """[R] sum of the values of each prompt."""
    return np.bincount(np.unique(prompt, return_inverse=True)[1], weights=values)
