"""Values that are right alone and wrong together: a run with them would learn from a wrong signal without a word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from inflight.config import ConfigError, RunConfig, Sampling

LEARNS_LITTLE = ("ppo", "grpo", "dr_grpo", "dapo", "gspo")
"""Objectives whose clip is against who sampled: with tokens of several versions it silences what is worth most."""


def require_sound(run: RunConfig) -> None:
    """Raises ConfigError naming the first value that does not go with another one, and what does."""
    if run.trainer.autocast and run.model.dtype != "bfloat16":
        raise ConfigError(
            f"trainer.autocast=true is not allowed with model.dtype={run.model.dtype}: the trainer would compute in"
            " bfloat16 what the generators compute otherwise; set trainer.autocast=false, or model.dtype=bfloat16"
        )
    for teacher in teachers(run):
        for each in fields(Sampling):
            if (value := getattr(run.rollout, each.name)) != each.default:
                raise ConfigError(
                    f"rollout.{each.name}={value} is not allowed with {teacher}: a teacher scores at temperature 1,"
                    f" uncut, and would differ from a student that is the same model; {each.default} is allowed"
                )


def warnings(run: RunConfig) -> Iterator[str]:
    """A line for each pairing that learns little by this project's own data, though nothing about it is wrong."""
    name, lag = run.trainer.objective.name, run.gate.max_lag
    if name in LEARNS_LITTLE and lag > 0:
        yield (
            f"trainer.objective.name={name} clips against who sampled: with gate.max_lag={lag} it learnt little in our"
            ' runs, where tis did (docs/objectives.md, "What the data says"); gate.max_lag=0 is what it is made for'
        )


def teachers(run: RunConfig) -> Iterator[str]:
    """The values by which a teacher's log-probabilities are learnt from."""
    if run.trainer.advantage.name == "distillation":
        yield "trainer.advantage.name=distillation"
    if run.trainer.objective.kl and run.trainer.objective.kl_reference == "teacher":
        yield "trainer.objective.kl_reference=teacher"
