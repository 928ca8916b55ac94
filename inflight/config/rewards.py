"""Options of the rewards that score completions, in addition to the task's own score or instead of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.config.checks import ConfigError, require

TASK = "task"
"""The name that stands for the task's own score."""
GROUP = "group"
COMPLETION = "completion"
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_REWARDS = 64


@dataclass(frozen=True)
class RewardConfig:
    """One reward: `name` is built in, `task`, `package.module:function` or `path/to/file.py:function`."""

    name: str
    weight: float = 1.0
    """Factor of its value in the sum that is trained on; 0: it is only measured."""
    label: str = ""
    """Its name in metrics; empty: `name`, or for a path the part after the colon."""
    per: str = ""
    """`group`: one call has all completions of a question; `completion`: each has a call of its own, as soon as it is
    complete. Empty: `group` for functions of one's own, `completion` for built-in ones, which look at no other one."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        allowed = "a built-in name, package.module:function or file.py:function"
        require(bool(self.name), "rewards: name", self.name, allowed)
        fits = math.isfinite(self.weight) and abs(self.weight) <= 1e6
        require(fits, f"rewards ({self.name}): weight", self.weight, "a number of at most 1000000")
        wanted = "letters, digits, _, . and -, at most 64"
        require(_LABEL.fullmatch(self.known_as) is not None, f"rewards ({self.name}): label", self.known_as, wanted)
        require(self.per in ("", GROUP, COMPLETION), f"rewards ({self.name}): per", self.per, f"{GROUP}, {COMPLETION}")
        if self.is_task and self.per:
            raise ConfigError("rewards (task): per is not allowed: a task scores one completion at a time")
        if self.is_task and self.options:
            raise ConfigError("rewards (task): options are not allowed: those of the task are task.options")

    @property
    def is_task(self) -> bool:
        """Whether it is the task's own score."""
        return self.name == TASK

    @property
    def of_group(self) -> bool:
        """Whether one call has all completions of a question."""
        return self.per == GROUP or (not self.per and ":" in self.name)

    @property
    def known_as(self) -> str:
        """Its name in metrics."""
        return self.label or self.name.rpartition(":")[2]


def require_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Raises ConfigError when two have the same name in metrics, or none has a weight."""
    require(len(rewards) <= MAX_REWARDS, "rewards", f"{len(rewards)} entries", f"at most {MAX_REWARDS}")
    seen = set[str]()
    for index, each in enumerate(rewards):
        if each.known_as in seen:
            raise ConfigError(f"rewards[{index}]: {each.known_as} is there already: give one of the two another label")
        seen.add(each.known_as)
    if rewards and not any(each.weight for each in rewards):
        raise ConfigError("rewards: all weights are 0, so there is nothing to learn from")
