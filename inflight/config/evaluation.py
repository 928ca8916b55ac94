"""How a run is evaluated on questions that are held out."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.config.checks import require, require_fields, require_one_of
from inflight.config.trainer import TrainerConfig

TRAINING_REQUESTS = ("continue", "pause")
MAX_SAMPLES = 4096
"""Of a question."""


@dataclass(frozen=True)
class EvalSampling:
    """How an answer to a held-out question is drawn. It ends as one that is trained on does: by `rollout.stop`,
    `stop_token_ids` and `ignore_eos`."""

    temperature: float = 0.0
    """0: the most probable token each time."""
    top_p: float = 1.0
    max_tokens: int = 0
    """0: as many as rollout.max_tokens."""
    samples: int = 1
    """Answers to each question, each with a seed of its own that is the same in every evaluation."""

    def __post_init__(self) -> None:
        place = "eval.sampling"
        require_fields(self, place, "temperature max_tokens", least=0)
        require(
            self.temperature == 0 or self.temperature >= 0.01,
            f"{place}.temperature",
            self.temperature,
            "0, or 0.01 or more: vLLM takes a lower one for that",
        )
        require(0 < self.top_p <= 1, f"{place}.top_p", self.top_p, "above 0, at most 1")
        require_fields(self, place, "samples", least=1, most=MAX_SAMPLES)
        drawn = self.temperature > 0 or self.samples == 1
        require(drawn, f"{place}.samples", self.samples, f"1 with {place}.temperature=0: all answers would be the same")
        cut = self.temperature > 0 or self.top_p == 1
        require(cut, f"{place}.top_p", self.top_p, f"1 with {place}.temperature=0: nothing is drawn")


@dataclass(frozen=True)
class EvalConfig:
    """Held-out questions that are answered under one version while training continues (docs/evaluation.md)."""

    every: int = 0
    """Steps from one evaluation to the next; 0: none."""
    at_start: bool = False
    """Evaluate the version that a run begins with, too."""
    questions: int = 0
    """How many of the task's held-out questions, from the first on; 0: all."""
    sampling: EvalSampling = field(default_factory=EvalSampling)
    pass_k: list[int] = field(default_factory=lambda: [1])
    """For which k to estimate pass@k: that one of k answers is correct."""
    correct_at: float = 1.0
    """The reward from which on an answer is correct."""
    concurrency: int = 32
    """Requests that are under way at a time."""
    training_requests: str = "continue"
    """What the pinned generator does with the actors' requests. `continue`: it answers them under the pinned version.
    `pause`: they go to other generators or, where there is none, wait."""
    timeout_s: float = 300.0
    """What an evaluation may take; then it is given up, and its generator commits the newest version."""
    keep_best: bool = True
    """Keep the checkpoint of the best evaluation in `best/`. It costs writing a checkpoint for each evaluation."""
    best_by: str = "reward"
    """What decides: `reward`, or `pass@k` with a k of eval.pass_k."""

    def __post_init__(self) -> None:
        require_fields(self, "eval", "every questions", least=0)
        require_fields(self, "eval", "concurrency", least=1, most=65536)
        require_fields(self, "eval", "timeout_s")
        samples = self.sampling.samples
        fits = bool(self.pass_k) and all(1 <= k <= samples for k in self.pass_k)
        require(fits, "eval.pass_k", self.pass_k, f"numbers from 1 to eval.sampling.samples={samples}")
        require_one_of(self, "eval", "best_by", ["reward", *(f"pass@{k}" for k in self.pass_k)])
        require_one_of(self, "eval", "training_requests", TRAINING_REQUESTS)

    def require_fits(self, longest: int, generators: int, trainer: TrainerConfig) -> None:
        """Raises ConfigError for what can't be in a run with so many generators; `longest` is the number of tokens that
        a completion may have."""
        asked = self.sampling.max_tokens
        fits = asked <= longest
        require(fits, "eval.sampling.max_tokens", asked, f"below generator.max_model_len: {longest} or less")
        if not self.every:
            return
        pauses = self.training_requests == "pause"
        limit_s = trainer.batch_timeout_s
        fits = not pauses or generators > 1 or self.timeout_s < limit_s
        because = f"below trainer.batch_timeout_s={limit_s:g} with eval.training_requests=pause and one generator"
        require(fits, "eval.timeout_s", self.timeout_s, because)
        fits = pauses or not trainer.synchronous
        because = "pause with trainer.synchronous, where no token may be old"
        require(fits, "eval.training_requests", self.training_requests, because)
