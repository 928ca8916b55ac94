"""The tasks by name: a module of this package, or `package.module:Class` for one of your own."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, cast

from inflight.config import ConfigError, TaskConfig
from inflight.config.checks import raised, require_takes
from inflight.error_line import one_line
from inflight.nearest_name import meant
from inflight.tasks.base import Item, Score, Task, TurnScorer

__all__ = ["Item", "Score", "Task", "TurnScorer", "make"]

TASKS = {
    "addition": "inflight.tasks.addition:Addition",
    "dataset": "inflight.tasks.dataset:Dataset",
    "distillation": "inflight.tasks.distillation:Distillation",
    "gym": "inflight.tasks.gym:Gym",
    "progression": "inflight.tasks.progression:Progression",
}


def make(config: TaskConfig, seed: int) -> Task:
    """Constructs the task of a run; its module is imported only now.

    A task is a dataclass with a field `seed`; its other fields are the options. Raises ConfigError that names an
    unknown task or option, and the known ones.
    """
    path = config.name if ":" in config.name else TASKS.get(config.name, "")
    module_name, _, class_name = path.partition(":")
    if not module_name:
        known = meant(config.name, TASKS) or f"{', '.join(TASKS)}, or package.module:Class"
        raise ConfigError(f"task.name={config.name!r} is not known: {known}")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task.name={config.name!r} can't be imported: {one_line(error)}") from None
    except (Exception, SystemExit) as error:  # foreign code
        raise ConfigError(f"task.name={config.name!r} can't be imported: {raised(error)}") from error
    _check_options(config, kind)
    try:
        return cast(Task, kind(seed=seed, **config.options))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # foreign code
        raise ConfigError(f"task.name={config.name!r} can't be made: {raised(error)}") from error


def _check_options(config: TaskConfig, kind: type[Any]) -> None:
    """Checks names and types of options."""
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"task.name={config.name!r} is not a dataclass with a field 'seed'")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init and field.name != "seed"}
    for name, value in config.options.items():
        if name not in fields:
            known = meant(name, fields) or ", ".join(sorted(fields)) or "it has none"
            raise ConfigError(f"task.options.{name} is not an option of task {config.name}: {known}")
        require_takes(fields[name], kind, value, f"task.options.{name}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in config.options:
            raise ConfigError(f"task.options.{name} is missing: task {config.name} needs it")
