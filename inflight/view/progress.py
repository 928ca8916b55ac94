"""How far a run is: what its processes have reported last, and what its files say of its steps.

Fed by the processes' `Status` messages. Known keys, all optional:

* trainer    step, reward, reward_all, lag_mean, lag_max, tokens_per_s, swaps, gap_ms (last swap), running_at_swap,
             phase, eval_reward, eval_step, eval_of (its standard error and number of questions, as text); committed_G,
             behind_G and state_G of a generator G; of the buffer: buffer, in_flight, buffer_ages (in versions, as
             text), dropped/REASON, rollouts/REASON, failed/REASON;
* generator  version, running, waiting, tokens_per_s, phase;
* actor      in_flight, done, failed, phase, questions (of all epochs); first_failed/REASON, details of the first
             group that failed so.

Each line of `warnings` is shown once. `phase` is a short text such as "loading", shown until there are numbers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping

from inflight.config import RunConfig
from inflight.metrics import counts_of
from inflight.report.visible import visible
from inflight.types import Value
from inflight.view.figures import duration, finite, number, whole
from inflight.view.record import RecentLines

PACE_STEPS = 20
"""Last steps whose median duration predicts the time left."""


class Progress:
    """The latest values of every process and the run's record."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.record = RecentLines(config.path)
        self.over = False
        """Whether the run has ended."""
        self._started = time.monotonic()
        self._latest: dict[str, dict[str, Value]] = {}

    def update(self, source: str, values: Mapping[str, Value]) -> None:
        """Merges one status message; keys that it does not contain keep their last values. Texts may hold what a model
        or foreign code has written, so that control codes are made visible."""
        shown = {name: visible(value) if isinstance(value, str) else value for name, value in values.items()}
        self._latest.setdefault(source, {}).update(shown)

    def end(self) -> None:
        """The run has ended: what its processes have reported last describes nothing that is."""
        self.over = True
        self._latest.clear()

    def forget(self, source: str) -> None:
        """Drops the values of a process that ended: they do not describe the one that replaces it."""
        self._latest.pop(source, None)

    def began(self, elapsed_s: float) -> None:
        """Tells that the launcher began `elapsed_s` seconds ago."""
        self._started = time.monotonic() - elapsed_s

    @property
    def latest(self) -> Mapping[str, Mapping[str, Value]]:
        """The latest values of every process that has reported, by name."""
        return self._latest

    def of(self, source: str) -> Mapping[str, Value]:
        """The latest values of a process."""
        return self._latest.get(source, {})

    def sources(self) -> list[str]:
        """The processes that have reported, by name."""
        return sorted(self._latest)

    def counted(self, prefix: str, figure: str) -> dict[str, int]:
        """Counts by reason: `figure` of the last step's line, and newer ones of the trainer's status, whose names begin
        with `prefix`."""
        named = self.of("trainer").items()
        reported = {name.removeprefix(prefix): whole(value) for name, value in named if name.startswith(prefix)}
        return counts_of(self.record.last, figure) | {reason: count for reason, count in reported.items() if count}

    def generators(self) -> list[str]:
        """The configured generators, and those that have joined beyond them, by number."""
        further = {name for name in self._latest if self.config.is_generator(name)}
        return sorted(further.union(self.config.generator_names()), key=lambda name: int(name[1:]))

    @property
    def step(self) -> Value:
        """The last step that was reported or recorded, or the one that the run is resumed from."""
        recorded = whole(self.record.last.get("step")) or self.config.start_version
        reported = self.of("trainer").get("step", recorded)
        return max(reported, recorded) if isinstance(reported, int) else reported

    @property
    def elapsed_s(self) -> float:
        """Seconds since the launcher began."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float | None:
        """Seconds until all steps are done, or the data end, if steps take as long as the last ones; None before the
        second step, and until this start of the trainer has done one."""
        times = [finite(each.get("time_s")) for each in list(self.record.steps)[-PACE_STEPS - 1 :]]
        took = [b - a for a, b in itertools.pairwise(times) if a is not None and b is not None and b > a]
        done = whole(self.step)
        if not took or done is None or "step" not in self.of("trainer"):
            return None
        return statistics.median(took) * max(self.last_step - done, 0)

    @property
    def last_step(self) -> int:
        """The last one that is configured, or for which there are enough questions as far as their number is known:
        fewer are made where groups are lost or left out."""
        known = [whole(values.get("questions")) for values in self._latest.values()]
        enough = [count // self.config.trainer.groups_per_step for count in known if count is not None]
        return min([self.config.trainer.steps, *enough])

    @property
    def step_of(self) -> str:
        """The step, of how many, and how many the data are enough for where that is fewer."""
        steps = self.config.trainer.steps
        return f"{self.step}/{steps}" + (f" (data for {self.last_step})" if self.last_step < steps else "")

    def line(self) -> str:
        """One line of plain text; how long a run took that has ended is not known to the view."""
        return self.news() if self.over else f"{duration(self.elapsed_s)} · {self.news()}"

    def news(self) -> str:
        """The line without the elapsed time."""
        trainer = self.of("trainer")
        parts = [f"step {self.step_of}"]
        parts += self._trainer_parts(trainer)
        if not self.over:
            parts += [f"{name} {self._generator_text(name)}" for name in self.generators()]
        if (left := self.left_s) is not None:
            parts.append(f"{duration(left)} left")
        return " · ".join(parts)

    def _trainer_parts(self, values: Mapping[str, Value]) -> list[str]:
        """The known figures on learning and swaps, each a few words; before the first step, the phase."""
        parts = [] if "reward" in values else [str(values.get("phase", "has ended" if self.over else "starting"))]
        if "reward" in values:
            of_all = f" (all {number(values['reward_all'])})" if _differs(values) else ""
            parts.append(f"reward {number(values['reward'])}{of_all}")
        if "lag_mean" in values:
            parts.append(f"lag {number(values['lag_mean'])} (max {values.get('lag_max', '?')})")
        if "buffer" in values:
            parts.append(f"buffer {values['buffer']}/{self.config.capacity}")
        if "tokens_per_s" in values:
            parts.append(f"{number(values['tokens_per_s'])} tokens/s")
        if values.get("swaps"):
            gap = f", last gap {number(values['gap_ms'])} ms" if "gap_ms" in values else ""
            parts.append(f"{values['swaps']} swaps{gap}")
        if "eval_reward" in values:
            of = f", {values['eval_of']}" if values.get("eval_of") else ""
            parts.append(f"held-out {number(values['eval_reward'])} (version {values['eval_step']}{of})")
        return parts

    def _generator_text(self, name: str) -> str:
        values = self.of(name)
        if "version" not in values:
            return str(values.get("phase", "starting"))
        parts = [f"version {values['version']}"]
        parts += [f"{values[key]} {key}" for key in ("running", "waiting") if key in values]
        if "tokens_per_s" in values:
            parts.append(f"{number(values['tokens_per_s'])} tokens/s")
        return ", ".join(parts)


def _differs(values: Mapping[str, Value]) -> bool:
    """Whether the gate has dropped groups, so that the reward of those trained on is not that of all."""
    return "reward_all" in values and values["reward_all"] != values["reward"]
