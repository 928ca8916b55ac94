"""Combinations of valid options, and of options and data, that are refused or warned of: with them a run would silently
use a wrong signal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from inflight.config import ConfigError, RunConfig, Sampling

LEARNS_LITTLE = ("ppo", "grpo", "dr_grpo", "dapo", "gspo")
"""Objectives that clip against the behaviour policy: with tokens of several versions they lose most of the signal."""
FEW_HELD_OUT = 30
"""Questions of an evaluation below which it is warned of: the standard error of their mean is as large as what a short
run changes."""
HOLD_OUT = ("held_out", "held_out_path", "held_out_split")
"""Options of a task of files by which questions are held out."""


def require_sound(run: RunConfig) -> None:
    """Raises ConfigError that names the first combination that is not allowed, and what is."""
    if run.trainer.autocast and run.model.dtype != "bfloat16":
        raise ConfigError(
            f"trainer.autocast=true is not allowed with model.dtype={run.model.dtype}: the trainer would compute in"
            " bfloat16, unlike the generators; set trainer.autocast=false, or model.dtype=bfloat16"
        )
    _require_adapter(run)
    for teacher in teachers(run):
        for each in fields(Sampling):
            if (value := getattr(run.rollout, each.name)) != each.default:
                raise ConfigError(
                    f"rollout.{each.name}={value} is not allowed with {teacher}: a teacher scores at temperature 1"
                    f" without truncation, and would differ from an identical student; {each.default} is allowed"
                )


def _require_adapter(run: RunConfig) -> None:
    """Refuses by name what is not done with an adapter yet."""
    trainer = run.trainer
    for name, value, allowed in (
        ("trainer.gradient_checkpointing", trainer.gradient_checkpointing, False),
        ("trainer.checkpoint_dtype", trainer.checkpoint_dtype, "float32"),
    ):
        if run.trainer.adapter and value != allowed:
            raise ConfigError(f"{name}={value} is not allowed with trainer.lora.rank: {allowed} is")
    if run.trainer.adapter and run.trainer.adapter == (run.model.served_name or run.model.name):
        raise ConfigError(f"trainer.lora.name={run.trainer.adapter} is not allowed: the base is served by that name")


def warnings(run: RunConfig) -> Iterator[str]:
    """One line for each combination that is valid, and learned little in this project's measurements or misleads."""
    name = run.trainer.objective.name
    lag = run.gate.max_lag
    if name in LEARNS_LITTLE and lag > 0:
        yield (
            f"trainer.objective.name={name} clips against the behaviour policy: with gate.max_lag={lag} it learned"
            ' little in our runs, unlike tis (docs/objectives.md, "What the data says"); it suits gate.max_lag=0'
        )
    warmup = run.trainer.warmup_steps
    steps = run.trainer.steps
    if warmup > steps:
        yield (
            f"trainer.warmup_steps={warmup} is more than trainer.steps={steps}: the learning rate ends at"
            f" {steps / warmup:.2g} of trainer.learning_rate={run.trainer.learning_rate:g}"
        )
    held_out = run.task.options.get("held_out")
    if run.eval.questions:
        yield from _few_held_out(run, run.eval.questions, f"eval.questions={run.eval.questions}")
    elif ":" not in run.task.name and isinstance(held_out, int):  # a number; of data it is a share, or a file
        yield from _few_held_out(run, held_out, f"task.options.held_out={held_out}")


def warnings_of_data(run: RunConfig, questions: int | None, held_out: int) -> Iterator[str]:
    """One line for each option that does not suit the size of the data: `questions` to train on, over all epochs (None:
    not known), and `held_out` ones."""
    trainer = run.trainer
    last = trainer.steps if questions is None else questions // trainer.groups_per_step
    late = []
    if last < trainer.warmup_steps <= trainer.steps:
        late.append(f"trainer.warmup_steps={trainer.warmup_steps} is longer")
    if last < trainer.steps and trainer.schedule.follows_steps:
        late.append(f"trainer.schedule.name={trainer.schedule.name} decays over all {trainer.steps}")
    if late:
        yield (
            f"the data are enough for {last} of trainer.steps={trainer.steps} ({questions} questions over"
            f" task.epochs={run.task.epochs}, trainer.groups_per_step={trainer.groups_per_step}), and"
            f" {' and '.join(late)}: choose {'them' if len(late) > 1 else 'it'} by the data"
        )
    if not run.eval.questions:
        given = (f"task.options.{name}={run.task.options[name]}" for name in HOLD_OUT if run.task.options.get(name))
        yield from _few_held_out(run, held_out, next(given, f"task.name={run.task.name}"))


def _few_held_out(run: RunConfig, asked: int, source: str) -> Iterator[str]:
    if run.eval.every and 0 < asked < FEW_HELD_OUT:
        yield (
            f"an evaluation asks {asked} question{'s' * (asked > 1)} ({source}), fewer than {FEW_HELD_OUT}: differences"
            " within its standard error, which is large then, may be chance, and so may the choice of the best version"
        )


def teachers(run: RunConfig) -> Iterator[str]:
    """The options that make the trainer use a teacher's log-probabilities."""
    if run.trainer.advantage.name == "distillation":
        yield "trainer.advantage.name=distillation"
    if run.trainer.objective.kl and run.trainer.objective.kl_reference == "teacher":
        yield "trainer.objective.kl_reference=teacher"
