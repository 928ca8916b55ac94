"""Whether a run's task can be made, and its answers be scored: what can be known before the run starts."""

from __future__ import annotations

from collections.abc import Callable

from inflight.config import ConfigError, RunConfig, require
from inflight.config.pairings import teachers
from inflight.rewards import RESERVED, make
from inflight.tasks import make as make_task
from inflight.tasks.base import HeldOut, Item, OfFiles, Task, TurnScorer, columns_of


def usable_task(config: RunConfig) -> Task:
    """The task of a run. Raises ConfigError when it or a reward can't be made, when nothing scores its answers, when
    it is to be evaluated and holds no question out, when the trainer learns from more than whole completions and it
    scores those alone, or when a reward needs a column that its first question does not have."""
    task = make_task(config.task, config.seed)
    own = not config.rewards or any(each.is_task for each in config.rewards)
    if own and not (hasattr(task, "score") or isinstance(task, TurnScorer)):
        raise ConfigError(
            f"task.name={config.task.name!r} has no score of its own: rewards must say how answers are scored"
            " (docs/rewards.md)"
        )
    _require_turns(config, task)
    if config.eval.every and not isinstance(task, OfFiles):
        require_held_out(task, config)
    if config.rewards and not isinstance(task, OfFiles):  # whose data are read by `examine`
        try:
            first = task.item(0)
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - foreign code: it fails again where it is counted, or the data are at their end
            return task
        require_columns(config, first)
    return task


def _require_turns(config: RunConfig, task: Task) -> None:
    """Raises ConfigError when the trainer needs step rewards or a teacher, and the task's score gives none or is not
    asked for."""
    learnt_from = list(teachers(config))
    if config.trainer.advantage.name == "process":
        learnt_from.append("trainer.advantage.name=process")
    if learnt_from and config.rewards and not any(each.is_task for each in config.rewards):
        raise ConfigError(
            f"{learnt_from[0]} is not allowed with these rewards: it needs the task's own score; add one named task"
        )
    if learnt_from and not isinstance(task, TurnScorer):
        raise ConfigError(
            f"{learnt_from[0]} is not allowed with task.name={config.task.name}: the task scores whole completions, and"
            " returns neither step rewards nor teacher log-probabilities (docs/tasks.md, score_turn)"
        )


def require_held_out(task: Task, config: RunConfig) -> None:
    """Raises ConfigError for a task that has no question to be evaluated by, or fewer than the run is to ask."""
    held = task.held_out_size() if isinstance(task, HeldOut) else 0
    if held < 1:
        name = config.task.name
        why = "eval.every is set, and " if config.eval.every else ""
        raise ConfigError(f"{why}task.name={name} holds no question out (docs/evaluation.md)")
    asked = config.eval.questions
    allowed = f"1 to {held}, which is how many questions task.name={config.task.name} holds out, or 0 for all"
    require(asked <= held, "eval.questions", asked, allowed)


def unscorable(config: RunConfig) -> Callable[[Item], str]:
    """A function that says which reward needs which column that a question does not have; empty where all can
    score it. Raises ConfigError when a reward can't be made."""
    needs = [
        (each.known_as, make(each, f"rewards[{index}]").needs)
        for index, each in enumerate(config.rewards)
        if not each.is_task
    ]

    def why(item: Item) -> str:
        columns = columns_of(item).keys()
        missing = ((name, min(needed - columns)) for name, needed in needs if needed - columns)
        return next((f"reward {name} needs the column {column}" for name, column in missing), "")

    return why


def require_columns(config: RunConfig, item: Item) -> None:
    """Raises ConfigError for a column that a reward needs and a question does not have, that a reward can't be given,
    or that has the name of what every question has; or when a reward can't be made."""
    columns = columns_of(item)
    name = config.task.name
    for index, each in enumerate(config.rewards):
        place = f"rewards[{index}]"
        if each.is_task:
            continue
        reward = make(each, place)
        if missing := sorted(reward.needs - columns.keys()):
            there = ", ".join(sorted(columns)) or "none"
            raise ConfigError(
                f"{place} needs the column {missing[0]}, which task {name} does not have; it has: {there}"
            )
        if refused := sorted(reward.refuses & columns.keys()):
            raise ConfigError(
                f"{place}.name={each.name!r} can't be given the column {refused[0]}, a name that its __call__ has for"
                f" its own object: write `def __call__({refused[0]}, /, …)`, or rename the column"
            )
    if taken := sorted(columns.keys() & set(RESERVED)):
        raise ConfigError(
            f"task.name={name!r} has a column {taken[0]}, a name that rewards are given something else by: rename it"
        )
