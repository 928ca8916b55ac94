"""Whether recorded log-probabilities are a model's, up to its dtype's rounding: one rule for any model.

Rounding moves logits. The effect on a token's log-probability is proportional to how unsure the model is of it: with
logits that are off by e each, log p is off by about e (1 - p). So differences d = recorded - replayed are counted in
steps of `STEP[dtype] (1 - p) / temperature`, p being the replayed probability. In these steps rounding is nearly
the same at every confidence, and its median lies between 0.4 and 30 for all models and dtypes that were measured
(docs/audit.md). A record agrees when

* the median of |d| is at most TYPICAL steps,
* no |d| is above SPREAD times the median (at least 1),
* the mean of d is 0, up to half of d's mean square (by which rounding moves the mean of a logarithm), half a step of an
  improbable token, and STANDARD_ERRORS standard errors,
* recorded values rise as the replayed ones do: the slope of recorded over replayed ones is 1, up to SLOPE and
  STANDARD_ERRORS standard errors.

The first two need one token. The others need LEAST_PROMPTS prompts: the tokens of a prompt depend on each other, so
that errors are taken over prompts.

Example:
    found = compare(recorded, replayed, "bfloat16", temperature=0.7, prompt=prompt)     # [N] each, in nats
    if not found.agrees:
        raise RuntimeError("; ".join(found.problems))

`recorded` is what a generator returned, `replayed` what a model computes for the same tokens in the same contexts, both
of the distribution that was sampled from (sampling.py). `dtype` is the coarser one of the two computations. A replay in
bfloat16 doubles the variance of d, which TYPICAL has room for; one in float32 is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11, "float32": 2.0**-20}
"""Relative size of a rounding, by dtype. TF32: CUDA attention kernels multiply float32 in it. Sums are accumulated in
float32 or higher, in an order of the kernel's own; for float32 that is the whole error, about 16 roundings of
2**-24."""
TYPICAL = 48.0
"""Steps. Measured in bfloat16: 2.4 (tiny) to 14 (SmolLM2), 27 for 24 layers of large random weights."""
SPREAD = 50.0
"""Largest ratio of the largest difference to the median one. Measured: 3 to 16 for 960 tokens."""
SLOPE = 0.05
"""Measured: within 0.01 of 1."""
STANDARD_ERRORS = 4.0
LEAST_PROMPTS = 8
"""With fewer prompts their spread is unknown."""
FLOAT32_LOGARITHM = 2.0**-22
"""Relative error of a log-probability computed in float32, also for certain tokens."""


def arithmetic(dtype: str, *, cuda: bool) -> str:
    """The dtype in which generators multiply, a key of STEP; `dtype` is that of their weights. vLLM's attention kernels
    on CUDA multiply float32 in TF32."""
    return "tf32" if cuda and dtype == "float32" else dtype


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a comparison; a figure is NaN when there was too little to compute it from."""

    tokens: int
    median: float
    """Median of |d| in nats."""
    largest: float
    """Largest |d| in nats; infinite when a value is no number."""
    steps: float
    """Median of |d| in steps."""
    steps_max: float
    """Largest |d| in steps."""
    at: int | None
    """Index of the token with the largest |d|; the first one that is no number, if there is one."""
    mean: float
    """Mean of d in nats."""
    slope: float
    """Slope of recorded over replayed values, least squares."""
    correlation: float
    problems: list[str]
    """Why the two don't agree, one sentence each."""

    @property
    def agrees(self) -> bool:
        """Whether there are no problems. Also true without any tokens: see `tokens`."""
        return not self.problems


def rounding_steps(
    replayed: np.ndarray, dtype: str, *, temperature: float = 1.0, cut: np.ndarray | None = None
) -> np.ndarray:
    """[N] nats: the size of a step for tokens of these log-probabilities ([N] float64).

    `cut` ([N] bool) marks tokens whose top-k or top-p set is unknown: the replay may exclude another token than the
    generator did, which changes a token however sure the model is of it. Raises KeyError for an unknown dtype.
    """
    unsure = -np.expm1(np.minimum(replayed, 0.0))
    if cut is not None:
        unsure = np.where(cut, 1.0, unsure)
    steps: np.ndarray = STEP[dtype] / temperature * unsure + FLOAT32_LOGARITHM * (1.0 + np.abs(replayed))
    return steps


def compare(
    recorded: ArrayLike,
    replayed: ArrayLike,
    dtype: str,
    *,
    temperature: float = 1.0,
    prompt: ArrayLike | None = None,
    cut: ArrayLike | None = None,
    most: float | None = None,
) -> Agreement:
    """Compares [N] log-probabilities, in nats.

    `prompt` ([N] int): index of the prompt of each token's sequence (default: a separate one for each token); `cut`:
    see rounding_steps. `most`: largest difference allowed in nats, instead of SPREAD. Raises ValueError for shapes that
    differ, KeyError for a dtype that is not in STEP.
    """
    x = np.asarray(replayed, dtype=float)
    y = np.asarray(recorded, dtype=float)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"{y.shape} recorded log-probabilities, {x.shape} replayed ones")
    prompts = np.arange(len(x)) if prompt is None else np.asarray(prompt)
    known = np.isfinite(x) & np.isfinite(y)
    strange = int(len(known) - known.sum())
    where = np.flatnonzero(known)
    x = x[known]
    y = y[known]
    prompts = prompts[known]
    steps = rounding_steps(x, dtype, temperature=temperature, cut=None if cut is None else np.asarray(cut)[known])
    sizes = np.abs(y - x)
    in_steps = np.abs(y - x) / steps
    mean, mean_problem = _mean(y - x, prompts, STEP[dtype] / temperature)
    slope, slope_problem = _slope(x, y, prompts)
    problems = [f"{strange} of {len(known)} log-probabilities are no numbers"] if strange else []
    problems += _typical(sizes, in_steps, dtype) + _largest(sizes, in_steps, dtype, most) + mean_problem + slope_problem
    at = int(np.flatnonzero(~known)[0]) if strange else int(where[in_steps.argmax()]) if len(x) else None
    return Agreement(
        tokens=len(known),
        median=float(np.median(sizes)) if len(x) else math.nan,
        largest=math.inf if strange else float(sizes.max(initial=0.0)),
        steps=float(np.median(in_steps)) if len(x) else math.nan,
        steps_max=float(in_steps.max()) if len(x) else math.nan,
        at=at,
        mean=mean,
        slope=slope,
        correlation=float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 and x.std() > 0 and y.std() > 0 else math.nan,
        problems=problems,
    )


def _typical(sizes: np.ndarray, in_steps: np.ndarray, dtype: str) -> list[str]:
    """Problems with most differences, in nats and in steps ([N] each)."""
    if not len(sizes) or (typical := float(np.median(in_steps))) <= TYPICAL:
        return []
    nats = f"{np.median(sizes):.3g} nats"
    return [f"the median difference, {nats}, is {typical:.3g} roundings of {dtype}; {TYPICAL:g} are allowed"]


def _largest(sizes: np.ndarray, in_steps: np.ndarray, dtype: str, most: float | None) -> list[str]:
    """Problems with the largest difference."""
    if not len(sizes):
        return []
    if most is not None:
        return (
            [] if sizes.max() <= most else [f"the largest difference is {sizes.max():.3g} nats; {most:g} are allowed"]
        )
    typical = float(np.median(in_steps))
    at = int(in_steps.argmax())
    allowed = SPREAD * max(typical, 1.0)
    if in_steps[at] <= allowed:
        return []
    return [
        f"the largest difference, {sizes[at]:.3g} nats, is {in_steps[at]:.3g} roundings of {dtype}; "
        f"{allowed:.3g} are allowed where the median is {typical:.2g}"
    ]


def _mean(off: np.ndarray, prompt: np.ndarray, step: float) -> tuple[float, list[str]]:
    """The mean of differences [N], and problems with it."""
    if len(np.unique(prompt)) < LEAST_PROMPTS:
        return (float(off.mean()) if len(off) else math.nan), []
    mean = float(off.mean())
    error = _cluster_error(off - mean, prompt) / len(off)
    allowed = step / 2 + float(off @ off) / len(off) + STANDARD_ERRORS * error
    if abs(mean) <= allowed:
        return mean, []
    return mean, [f"recorded ones are {mean:+.3g} nats off on average; {allowed:.2g} are allowed"]


def _slope(x: np.ndarray, y: np.ndarray, prompt: np.ndarray) -> tuple[float, list[str]]:
    """The slope of recorded values `y` over replayed ones `x` ([N] each), and problems with it."""
    if not len(x) or x.std() == 0:
        return math.nan, []
    x = x - x.mean()
    y = y - y.mean()
    weight = float(x @ x)
    slope = float(x @ y) / weight
    if len(np.unique(prompt)) < LEAST_PROMPTS:
        return slope, []
    allowed = SLOPE + STANDARD_ERRORS * _cluster_error(x * (y - slope * x), prompt) / weight
    if abs(slope - 1) <= allowed:
        return slope, []
    return slope, [f"recorded over replayed ones have a slope of {slope:.3f}, not of 1 ± {allowed:.2g}"]


def _cluster_error(values: np.ndarray, prompt: np.ndarray) -> float:
    """Standard error of a sum of values with mean 0 that are dependent within a prompt."""
    sums = np.bincount(np.unique(prompt, return_inverse=True)[1], weights=values)
    return math.sqrt(float(sums @ sums) * len(sums) / (len(sums) - 1))
