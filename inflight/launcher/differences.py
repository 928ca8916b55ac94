"""What differs in a resumed run from the run that it resumes and must not: its model, its questions, and how its tokens
are drawn."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inflight.config import ConfigError, RunConfig, Sampling
from inflight.metrics import METRICS_FILE
from inflight.trainer.checkpoint import index

FIXED = (
    "model.name",
    "model.revision",
    "model.dtype",
    "seed",
    "rollout.group_size",
    *(f"trainer.lora.{name}" for name in ("rank", "alpha", "rslora", "target_modules")),
    *(f"rollout.{name}" for name in Sampling.__dataclass_fields__),
)
"""Options that must not differ when a run is resumed, beside its task. They decide the weights, the questions, and the
meaning of the rollouts recorded so far: the trainer and an audit take their log-probabilities to be of one
distribution."""


@dataclass(frozen=True)
class Difference:
    """`said`: what is not as it was, such as `seed=3 is not allowed`; `was`: what the run began with."""

    said: str
    was: str


def refuse(run: RunConfig, found: Sequence[Difference]) -> None:
    """Raises ConfigError that names all that is found, in one line, and what else can be done; nothing for none."""
    if not found:
        return
    names = [f"the run in {run.path}", *["it"] * (len(found) - 1)]
    began = [f"{each.said}: {name} began with {each.was}" for name, each in zip(names, found, strict=True)]
    raise ConfigError("; ".join([*began, *_ways_out(run, found)]))


def of_task(before: RunConfig, now: RunConfig) -> Iterator[Difference]:
    """The task, its options, and the content of files.

    An option that names files is compared by their content (TaskConfig.contents), so that files may have moved.
    """
    was = before.task
    task = now.task
    for name in ("name", "epochs"):
        if getattr(task, name) != getattr(was, name):
            yield Difference(f"task.{name}={getattr(task, name)!r} is not allowed", repr(getattr(was, name)))
    if task.name != was.name:
        return  # it has other options
    of_files = was.contents.keys() & task.contents.keys()
    for option in sorted(was.options.keys() | task.options.keys()):
        name = f"task.options.{option}"
        if name not in of_files and task.options.get(option) != was.options.get(option):
            values = [repr(each[option]) if option in each else "its default" for each in (task.options, was.options)]
            yield Difference(f"{name}={values[0]} is not allowed", values[1])
    for name in sorted(of_files):
        if task.contents[name] != was.contents[name]:
            given = task.options.get(name.removeprefix("task.options."))
            named = name if given is None else f"{name}={given!r}"
            held = was.contents[name]
            yield Difference(f"{named} does not hold what it held", f"{held}, now it is {task.contents[name]}")


def of_options(before: RunConfig, now: RunConfig, names: Sequence[str] = FIXED) -> Iterator[Difference]:
    """Those of `names` that are not as they were."""
    for name in names:
        value = operator.attrgetter(name)(now)
        was = operator.attrgetter(name)(before)
        if value != was:
            yield Difference(f"{name}={value} is not allowed", str(was))


def _ways_out(run: RunConfig, found: Sequence[Difference]) -> Iterator[str]:
    checkpoint = index.newest(run.path)
    metrics = run.path / METRICS_FILE
    if checkpoint is None and not (metrics.exists() and metrics.stat().st_size):
        yield "it has no step: choose another run_dir or delete it"
    elif checkpoint is not None and not run.trainer.lora.rank and any("task.epochs=" in each.said for each in found):
        yield f"model.name={checkpoint} begins another run with its weights"
