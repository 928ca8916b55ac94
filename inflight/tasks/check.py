"""Whether a run's task can be made, and its answers be scored: what can be known before the run starts."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.config import ConfigError, RewardConfig, RunConfig
from inflight.rewards import RESERVED, make
from inflight.tasks import make as make_task
from inflight.tasks.base import Task, TurnScorer, columns_of


def usable_task(config: RunConfig) -> Task:
    """The task of a run. Raises ConfigError when it or a reward can't be made, when nothing scores its answers, or when
    a reward needs a column that its first question does not have."""
    task = make_task(config.task, config.seed)
    own = not config.rewards or any(each.is_task for each in config.rewards)
    if own and not (hasattr(task, "score") or isinstance(task, TurnScorer)):
        raise ConfigError(
            f"task.name={config.task.name!r} has no score of its own: rewards must say how answers are scored"
            " (docs/rewards.md)"
        )
    if config.rewards:
        _require_columns(config.rewards, task, config.task.name)
    return task


def _require_columns(rewards: Sequence[RewardConfig], task: Task, name: str) -> None:
    """Raises ConfigError for a column that is not there, or that has the name of what every question has."""
    needs = [
        (f"rewards[{index}]", make(each, f"rewards[{index}]").needs)
        for index, each in enumerate(rewards)
        if not each.is_task
    ]
    try:
        columns = columns_of(task.item(0))
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - foreign code: it fails again where it is counted, or the data are at their end
        return
    for place, wanted in needs:
        if missing := sorted(wanted - columns.keys()):
            there = ", ".join(sorted(columns)) or "none"
            raise ConfigError(f"{place} needs the column {missing[0]}, which task {name} does not have: {there}")
    if taken := sorted(columns.keys() & set(RESERVED)):
        raise ConfigError(
            f"task.name={name!r} has a column {taken[0]}, a name that rewards are given something else by: rename it"
        )
