"""Checks during training whether trainer and generators agree on log-probabilities (training-inference mismatch).

At tokens of lag 0 both have the same weights, so that a difference beyond rounding is one between two implementations.
start_comparison.py does the same before training, with requests of its own.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from inflight import agreement
from inflight.config import RunConfig, Sampling
from inflight.trainer.batch import Batch
from inflight.weights.publish.comparison import SUSPECTS, NumbersDiffer

PROMPTS_AT_ONCE = 16
"""Prompts that are judged together: those of one step may be too few for a significant difference."""
TOKENS_A_STEP = 1 << 14
"""Most tokens per step that are used, of those on this rank."""
log = logging.getLogger(__name__)


def coarser(config: RunConfig, device: torch.device) -> str:
    """The coarser dtype in which a trainer on `device` or its generators compute log-probabilities."""
    if config.trainer.autocast:
        return "bfloat16"
    return agreement.arithmetic(config.model.dtype, cuda=device.type == "cuda")


class LogprobMismatch:
    """Collects (recorded, computed) pairs over steps until they are of PROMPTS_AT_ONCE prompts, and judges them by the
    same rule as the comparison at the start. Warns when they begin to disagree; with `trainer.compare_lag_0=stop`
    `require` raises then.

    Uses only sequences sampled by one version from the first token to the last, prefill included: the trainer computes
    a sequence under one version, unlike a generator that swapped meanwhile. With several ranks, uses those of rank 0.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        """`device` is the trainer's."""
        self._mode = config.trainer.compare_lag_0
        self._dtype = coarser(config, device)
        self._sampling = Sampling.of(config.rollout)
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._tokens = 0
        self._problem = ""
        """The disagreement of the last judged tokens; empty if they agree."""

    @torch.no_grad()
    def add(self, logprobs: torch.Tensor, batch: Batch) -> None:
        """Adds a micro-batch: the trainer's `logprobs` [B, L], or `batch.proximal_logprobs` if the batch has them,
        which are from before its first update."""
        if self._mode == "off" or batch.one_version is None or self._tokens >= TOKENS_A_STEP:
            return
        computed = logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        taken = batch.completion_mask & (batch.lags == 0) & batch.one_version[:, None] & (batch.scales > 0)[:, None]
        rows = taken.nonzero(as_tuple=True)[0].tolist()
        if not rows:
            return
        prompt_of = {row: _prompt(batch, row) for row in set(rows)}
        cut = torch.full_like(taken, self._sampling.cuts)
        if batch.kept is not None:
            cut &= (batch.kept < 0).all(dim=-1)
        values = (each[taken].cpu().numpy() for each in (batch.behaviour_logprobs, computed, cut))
        self._parts.append((*values, np.array([prompt_of[row] for row in rows])))
        self._tokens += len(rows)

    def judge(self) -> dict[str, object]:
        """Called once per step; its part of the step's line, empty until there is enough to judge."""
        self._tokens = 0
        if not self._parts:
            return {}
        recorded, computed, cut, prompt = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        if len(np.unique(prompt)) < PROMPTS_AT_ONCE:
            return {}
        self._parts.clear()
        found = agreement.compare(
            recorded, computed, self._dtype, temperature=self._sampling.temperature, prompt=prompt, cut=cut
        )
        problem = "" if found.agrees else f"{'; '.join(found.problems)} ({found.tokens} tokens)"
        if problem and not self._problem:
            log.warning("%s", _line(problem))
        self._problem = problem
        figures = {"tokens": found.tokens, "median": found.median, "largest": found.largest, "agrees": found.agrees}
        return {"lag_0": figures}

    def require(self) -> None:
        """Raises NumbersDiffer, with `stop`, when the last judged tokens disagree."""
        if self._problem and self._mode == "stop":
            raise NumbersDiffer(_line(self._problem))


def _line(problem: str) -> str:
    return (
        f"tokens of lag 0 have other log-probabilities than the trainer computes under the same weights: {problem}; "
        f"the usual suspects: {SUSPECTS}"
    )


def _prompt(batch: Batch, row: int) -> int:
    """A number that all sequences of one prompt share."""
    drawn = batch.completion_mask[row]
    return hash(tuple(batch.input_ids[row, : int(drawn.int().argmax())].tolist()))
