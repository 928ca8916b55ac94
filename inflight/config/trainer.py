"""Options of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inflight.config.checks import LARGEST_REAL, MAX_PROCESSES, require, require_fields, require_one_of
from inflight.config.lora import LoraConfig

NORMALISATIONS = ("token", "sequence", "constant")
SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
"""Of the learning rate, as transformers names them."""
NEED_A_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Further ones of transformers, whose learning rate at a step does not follow from the step."""
MAX_UPDATES = 1024
"""Largest `updates_per_batch` and `epochs_per_batch`."""
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_REFERENCES = ("start", "teacher")
CHECKPOINT_DTYPES = ("float32", "bfloat16")
COMPARE_START = ("refuse", "warn", "off")
COMPARE_LAG_0 = ("warn", "stop", "off")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss (see docs/objectives.md)."""

    name: str = "tis"
    """A built-in objective or `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its keyword-only parameters."""
    normalise: str = ""
    """How the loss is averaged. `token`: all trained tokens of a step have the same weight. `sequence`: all sequences
    do, and so do the tokens within one. `constant`: the sum over tokens, divided by sequences times rollout.max_tokens.
    Empty: as in the objective's paper."""
    kl: float = 0.0
    """Weight of the KL divergence from a reference, per token."""
    kl_cap: float = 2.0
    """Cap of the weight min(p / p_behave, kl_cap) of a token's share of the divergence, which makes its gradient that
    of the divergence on stale tokens too. 0: no weight, and the estimator's own gradient, as in GRPO's paper."""
    kl_estimator: str = "k3"
    kl_reference: str = "start"
    """`start`: the model that the run started from. `teacher`: the model that scored the rollouts
    (docs/objectives.md)."""
    entropy: float = 0.0
    """Weight of the entropy bonus, per token."""

    def __post_init__(self) -> None:
        allowed = ("", *NORMALISATIONS)
        place = "trainer.objective"
        require(
            self.normalise in allowed, f"{place}.normalise", self.normalise, f"{', '.join(NORMALISATIONS)} or empty"
        )
        require_one_of(self, place, "kl_estimator", KL_ESTIMATORS)
        require_one_of(self, place, "kl_reference", KL_REFERENCES)
        require_fields(self, place, "kl kl_cap entropy", least=0)
        fits = self.kl_estimator != "k1" or self.kl_cap > 0
        instead = "k2, k3: without weights (trainer.objective.kl_cap=0) the gradient of k1 is not the divergence's"
        require(fits, f"{place}.kl_estimator", self.kl_estimator, instead)


@dataclass(frozen=True)
class AdvantageConfig:
    """The advantage of a token (see docs/objectives.md)."""

    name: str = "group_mean"
    """A built-in advantage or `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate after the warm-up (see docs/objectives.md)."""

    name: str = "constant"
    """As transformers names its schedules; over `trainer.steps` steps."""
    options: dict[str, Any] = field(default_factory=dict)
    """Given to it: `num_cycles`, `min_lr_rate`, `num_decay_steps` and so on, by schedule."""

    def __post_init__(self) -> None:
        allowed = ", ".join(SCHEDULES)
        if self.name in NEED_A_METRIC:
            allowed += f"; {self.name} follows a validation loss, which a run does not have"
        require(self.name in SCHEDULES, "trainer.schedule.name", self.name, allowed)

    @property
    def constant(self) -> bool:
        """Whether the learning rate stays, after the warm-up."""
        return self.name in ("constant", "constant_with_warmup")

    @property
    def follows_steps(self) -> bool:
        """Whether it decays over `trainer.steps`."""
        return not self.constant and self.name != "inverse_sqrt"


@dataclass(frozen=True)
class TrainerConfig:
    """Optimization."""

    steps: int = 40
    groups_per_step: int = 4
    synchronous: bool = False
    """Generate a step's groups only when the previous version is live on all generators, and train only then: no token
    is stale, and generation and training wait for each other. For comparison; requires gate.max_lag=0."""
    updates_per_batch: int = 1
    """Optimizer steps in one pass over a batch, each on a random part of its sequences. One version is published after
    all of them. With more than one update in total, the batch is scored before the first (`p_prox` in
    docs/objectives.md)."""
    epochs_per_batch: int = 1
    """Passes over a batch, each with a new random partition."""
    micro_batch: int = 8
    """Sequences per forward pass."""
    micro_batch_tokens: int = 0
    """Above 0: tokens per forward pass in place of sequences, padding included, and as many sequences as fit. Bounds
    the memory of activations, whatever the lengths in a step; at least generator.max_model_len."""
    packing: bool = False
    """Lay short sequences of a micro-batch end to end, instead of padding each to the longest (trainer/packing.py).
    On GPUs in bfloat16 all of a micro-batch are in one row, and attention needs no mask (trainer/varlen.py).
    Micro-batches then mix long and short ones; without, they are of similar lengths, so that small ones waste little:
    worth it where a micro-batch is a large part of a step."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass, not keep them: memory for about a third more time.
    Without it a model of 7B in bfloat16 keeps 6 MiB a token."""
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    """Decoupled decay of matrices; biases and the weights of norms do not decay."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    warmup_steps: int = 0
    """Steps over which the learning rate rises evenly, from 1 / warmup_steps of it in the first one."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    grad_clip: float = 1.0
    max_skipped_updates: int = 3
    """Successive updates with a non-finite gradient after which the run ends; each is skipped, and a batch whose
    updates were all skipped is not trained on."""
    autocast: bool = True
    """Forward and backward passes in bfloat16, on a copy of the weights; master weights and optimizer stay float32."""
    threads: int = 1
    """CPU threads of each process."""
    processes: int = 1
    """Ranks over which weights, gradients and optimizer are sharded (FSDP2); each has a GPU of its own, if there are
    GPUs."""
    rank_timeout_s: float = 120.0
    """Timeout in seconds of an operation of all ranks: a micro-batch, a step, a gather."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    checkpoints_kept: int = 0
    """Number of newest checkpoints to keep; 0 keeps all."""
    checkpoint_dtype: str = "float32"
    """Dtype of the weights in a checkpoint's model files. With `bfloat16` the float32 weights are stored beside the
    optimizer's state: a run resumes exactly from either."""
    checkpoint_timeout_s: float = 1800.0
    """Longest time that writing a checkpoint may take. It happens in the background."""
    batch_timeout_s: float = 600.0
    compare_start: str = "refuse"
    """Check of each generator when it joins and after its next swap: it samples a few tokens, which the trainer scores
    as well. If the log-probabilities differ by more than rounding, `refuse` stops using the generator, or ends the run
    before the first step if there is no other; `warn` logs it (docs/operations.md)."""
    compare_lag_0: str = "warn"
    """The same check during the run, on the rollouts' tokens that were sampled by the trainer's current version; `stop`
    ends the run."""

    @property
    def updates(self) -> int:
        """Optimizer steps from one version to the next."""
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def adapter(self) -> str:
        """The name of the LoRA adapter that is trained, by which requests select it; empty: all weights are trained."""
        return self.lora.name if self.lora.rank else ""

    def __post_init__(self) -> None:
        require_fields(self, "trainer", "steps groups_per_step micro_batch threads max_skipped_updates", least=1)
        require_fields(self, "trainer", "updates_per_batch epochs_per_batch", least=1, most=MAX_UPDATES)
        require_fields(self, "trainer", "processes", least=1, most=MAX_PROCESSES)
        require_fields(self, "trainer", "learning_rate weight_decay", least=0, most=LARGEST_REAL)
        require_fields(self, "trainer", "warmup_steps checkpoint_every checkpoints_kept micro_batch_tokens", least=0)
        require_fields(self, "trainer", "adam_epsilon", most=LARGEST_REAL)
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"trainer.{name}", value, "0 or more, below 1")
        require_one_of(self, "trainer", "compare_start", COMPARE_START)
        require_one_of(self, "trainer", "compare_lag_0", COMPARE_LAG_0)
        require_one_of(self, "trainer", "checkpoint_dtype", CHECKPOINT_DTYPES)
        require_fields(self, "trainer", "grad_clip batch_timeout_s rank_timeout_s checkpoint_timeout_s")
