"""Options of the task, of sampling and the actor, and of the gate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inflight.config.checks import MAX_PROCESSES, require, require_fields, require_one_of

MAX_RETRIES = 1000
"""Largest `gate.stale_retries`."""
MAX_TOKEN_ID = 1 << 24
SEEDS = ("auto", "always", "never")
MAX_GROUP = 4096
"""Largest group that a types.RolloutGroup can hold."""


@dataclass(frozen=True)
class TaskConfig:
    """The source of questions and scores. `name` is a module of inflight.tasks; `options` are passed to it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 1
    """Passes over the questions of a finite task; the run ends after them."""
    contents: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the files that `options` name, by option; set by the launcher. A resume with other data is
    refused."""

    def __post_init__(self) -> None:
        require_fields(self, "task", "epochs", least=1)


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are sampled from; recorded log-probabilities refer to it (inflight/sampling.py)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @staticmethod
    def of(config: Sampling) -> Sampling:
        """Only the sampling options, of a configuration that has more."""
        return Sampling(**{name: getattr(config, name) for name in Sampling.__dataclass_fields__})

    @property
    def cuts(self) -> bool:
        """Whether top-p, top-k or min-p excludes tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether penalties make the distribution depend on earlier tokens, in addition to the model itself."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class RolloutConfig(Sampling):
    """Sampling and the actor."""

    group_size: int = 8
    max_tokens: int = 64
    max_prompt_tokens: int = 0
    """Questions with longer prompts are left out and counted; 0: those that leave no room for a token within
    `generator.max_model_len`."""
    together_from_tokens: int = 512
    """Prompts of so many tokens or more are computed once: the samples of a group go to one generator, as long as it
    has at most `group_size` requests more than another one. 0: never."""
    kept_tokens: int = 19
    """Size of the largest set of tokens left by min-p, top-k and top-p that is recorded with a token; for a larger one
    the trainer computes its own set (docs/decisions/007-kept-sets.md)."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion; the text is part of the completion."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, beside the model's end tokens; the token is part of the completion."""
    ignore_eos: bool = False
    """Continue after the model's end tokens, up to `max_tokens`."""
    seeds: str = "auto"
    """Whether each request has a sampling seed of its own, which costs vLLM a Python loop per step. `auto`: where a
    question may be sampled again for being stale (`gate.on_stale=retry`, not with `trainer.synchronous`); `always`,
    `never`."""
    actors: int = 1
    """Processes that request and score answers. Each question goes to the actor that has the fewest in flight; a run
    may resume with another number of them."""
    concurrency: int = 4
    """Most groups that an actor has in flight."""
    token_timeout_s: float = 300.0
    """Seconds without a token after which a request is presumed lost; its sequence is continued by another generator.
    Time in a generator's queue does not count, and the length of a completion has no time limit."""
    reward_timeout_s: float = 30.0
    """Time limit in seconds for a score, and for a question. The process of a task that exceeds it is killed."""
    on_reward_failure: str = "drop"
    """What happens when a score fails, is late or is no number: `drop` gives the question up, `zero` uses reward 0,
    `retry` scores again, three times within 42 seconds, and then gives the question up."""
    reward_workers: int = 0
    """Processes of an actor for scoring; 0: one per CPU core, shared by the actors, at most 8. Questions and text have
    one more process each."""
    reward_concurrency: int = 32
    """Asynchronous scores that one process runs at once; blocking ones run one after the other."""
    reward_memory_mib: int = 4096
    """Private memory of each such process, and of each child that it starts; 0: unlimited."""
    task_start_timeout_s: float = 300.0
    """Time limit in seconds for constructing the task, including loading its data."""
    give_up_after_s: float = 300.0
    """Seconds of failures without one success after which an actor gives up; outages of generators do not count."""
    buffer_mib: float = 1024.0
    """Memory of the finished groups that wait for the trainer, in MiB. New groups are requested only while they are
    expected to fit, given the size of the last ones, but at least those of one step."""
    keep: bool = True
    """Write every rollout to the run folder (needed by the audit)."""
    file_mib: float = 1024.0
    """Size in MiB from which on the next rollouts are written to another file."""

    def __post_init__(self) -> None:
        fits = 2 <= self.group_size <= MAX_GROUP
        require(fits, "rollout.group_size", self.group_size, f"2 (advantages are relative) to {MAX_GROUP}")
        require_fields(self, "rollout", "max_tokens concurrency", least=1)
        fits = all(0 <= each < MAX_TOKEN_ID for each in self.stop_token_ids)
        require(fits, "rollout.stop_token_ids", self.stop_token_ids, f"ids of tokens, 0 to {MAX_TOKEN_ID - 1}")
        require_one_of(self, "rollout", "seeds", SEEDS)
        require(all(self.stop), "rollout.stop", self.stop, "texts of at least one character")
        require_fields(self, "rollout", "temperature", least=0.01)  # vLLM raises lower values to this
        require_fields(self, "rollout", "token_timeout_s reward_timeout_s buffer_mib file_mib")
        require_fields(self, "rollout", "task_start_timeout_s give_up_after_s")
        require_one_of(self, "rollout", "on_reward_failure", ("drop", "zero", "retry"))
        require_fields(self, "rollout", "actors", least=1, most=MAX_PROCESSES)
        require_fields(self, "rollout", "reward_workers", least=0, most=MAX_PROCESSES)
        require_fields(self, "rollout", "reward_concurrency", least=1, most=4096)
        require(
            self.reward_memory_mib == 0 or 256 <= self.reward_memory_mib <= 1 << 30,
            "rollout.reward_memory_mib",
            self.reward_memory_mib,
            "0 for no limit, or 256 or more: Python itself takes some",
        )
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "above 0, at most 1")
        require_fields(self, "rollout", "top_k min_p kept_tokens max_prompt_tokens together_from_tokens", least=0)
        require(self.min_p <= 1, "rollout.min_p", self.min_p, "0 to 1")
        require_fields(self, "rollout", "repetition_penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, f"rollout.{name}", getattr(self, name), "-2 to 2")

    def actor_names(self) -> list[str]:
        """`a0`, `a1`, …: the names of actors in messages and logs."""
        return [f"a{index}" for index in range(self.actors)]


@dataclass(frozen=True)
class GateConfig:
    """How stale tokens may be used (see rollout/gate.py)."""

    max_lag: int = 1
    """Steps generated ahead: the buffer admits at most (max_lag + 1) steps' groups, including those being generated."""
    max_token_lag: int = 8
    """Tokens older than this many versions are masked, but stay as context."""
    min_trained_share: float = 0.25
    """A sequence with a smaller share of unmasked tokens is dropped."""
    on_stale: str = "retry"
    """What happens to the question of a group that is dropped because members are too stale. `retry`: it is sampled
    again, with the same seeds, under newer weights. `drop`: it is given up."""
    stale_retries: int = 2
    """Most retries of a question with `retry`; then it is given up."""
    rules: list[dict[str, Any]] = field(default_factory=list)
    """Further rules in their order, such as `{name: oldest_lag, at_most: 2}`; `name` is built in or
    `package.module:function`."""
    ratio_rules: list[dict[str, Any]] = field(default_factory=list)
    """Rules on log-ratios, applied when the trainer has scored the tokens: `{name: token_ratio, low: 0.5, high: 2}`."""

    def __post_init__(self) -> None:
        require_fields(self, "gate", "max_lag max_token_lag", least=0)
        require(0 <= self.min_trained_share <= 1, "gate.min_trained_share", self.min_trained_share, "0 to 1")
        require_one_of(self, "gate", "on_stale", ("retry", "drop"))
        require_fields(self, "gate", "stale_retries", least=1, most=MAX_RETRIES)
        for name in ("rules", "ratio_rules"):
            for index, rule in enumerate(getattr(self, name)):
                named = isinstance(rule.get("name"), str)
                require(named, f"gate.{name}[{index}]", rule, "a rule has a name, and its options beside it")
