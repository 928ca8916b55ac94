"""What a person sees while a run is active: a live view in a terminal, else a line from time to time.

Fed by the processes' `Status` messages. Known keys, all optional:

* trainer    step, reward, reward_all, lag_mean, lag_max, buffer, groups_dropped, tokens_per_s, tokens_trained, swaps,
             gap_ms (last swap), running_at_swap, phase;
* generator  version, running, waiting, tokens_per_s, phase;
* actor      in_flight, done, failed, phase.

Each line of `warnings` is shown once. `phase` is a short text such as "loading", shown until there are numbers.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TypeGuard

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from inflight.config import RunConfig

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
SAME_LINE_S = 30.0
Value = float | int | str


def sparkline(values: list[float], width: int = SPARK_WIDTH) -> str:
    """The last `width` values as a row of block characters, scaled from minimum to maximum; "" for none."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return BLOCKS[0] * len(shown)
    return "".join(BLOCKS[int((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in shown)


class Progress:
    """The latest values of every process and the reward of every step received; renders them."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._started = time.monotonic()
        self._latest: dict[str, dict[str, Value]] = {}
        self._rewards: dict[int, float] = {}

    def update(self, source: str, values: Mapping[str, Value]) -> None:
        """Merges one status message; keys that it does not contain keep their last values."""
        self._latest.setdefault(source, {}).update(values)
        step, reward = values.get("step"), values.get("reward")
        if source == "trainer" and isinstance(step, int) and step > 0 and _is_finite(reward):
            self._rewards[step] = float(reward)

    def forget(self, source: str) -> None:
        """Drops the values of a process that ended: they do not describe the one that replaces it."""
        self._latest.pop(source, None)

    def line(self) -> str:
        """One line of plain text."""
        return f"{self._elapsed()} · {self.news()}"

    def news(self) -> str:
        """The line without the elapsed time."""
        trainer = self._of("trainer")
        parts = [f"step {self._step()}/{self._config.trainer.steps}"]
        parts += self._trainer_parts(trainer) or [str(trainer.get("phase", "starting"))]
        for name in self._config.generator_names():
            parts.append(f"{name} {self._generator_text(name)}")
        return " · ".join(parts)

    def render(self) -> Group:
        """The live view."""
        trainer = self._of("trainer")
        step, steps = self._step(), self._config.trainer.steps
        title = Text.assemble(("inflight", "bold"), f"  {self._config.path.name}  {self._elapsed()}")
        rows = Table.grid(padding=(0, 2))
        rows.add_row(f"step {step}/{steps}", ProgressBar(steps, step if _is_finite(step) else 0, width=SPARK_WIDTH))
        rewards = [self._rewards[at] for at in sorted(self._rewards)]
        if rewards:
            rows.add_row("reward", Text.assemble((sparkline(rewards), "green"), f" {rewards[-1]:.2f}"))
        rows.add_row("trainer", " · ".join(self._trainer_parts(trainer)) or str(trainer.get("phase", "starting")))
        for name in self._config.generator_names():
            rows.add_row(name, self._generator_text(name))
        for name in sorted(name for name in self._latest if name.startswith("a")):
            rows.add_row(name, self._actor_text(name))
        return Group(title, rows)

    def _step(self) -> Value:
        """The trainer's step, or the one that the run is resumed from."""
        return self._of("trainer").get("step", self._config.start_version)

    def _of(self, source: str) -> dict[str, Value]:
        return self._latest.get(source, {})

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02d}"

    def _trainer_parts(self, values: Mapping[str, Value]) -> list[str]:
        """The known figures on learning and swaps, each a few words."""
        parts = []
        if "reward" in values:
            of_all = f" (all {_number(values['reward_all'])})" if _differs(values) else ""
            parts.append(f"reward {_number(values['reward'])}{of_all}")
        if "lag_mean" in values:
            parts.append(f"lag {_number(values['lag_mean'])} (max {values.get('lag_max', '?')})")
        if "buffer" in values:
            parts.append(f"buffer {values['buffer']}/{self._config.capacity}")
        if "tokens_per_s" in values:
            parts.append(f"{_number(values['tokens_per_s'])} tokens/s")
        if values.get("swaps"):
            gap = f", last gap {_number(values['gap_ms'])} ms" if "gap_ms" in values else ""
            parts.append(f"{values['swaps']} swaps{gap}")
        if "eval_reward" in values:
            parts.append(f"held-out {_number(values['eval_reward'])} (version {values['eval_step']})")
        return parts

    def _generator_text(self, name: str) -> str:
        values = self._of(name)
        if "version" not in values:
            return str(values.get("phase", "starting"))
        parts = [f"version {values['version']}"]
        parts += [f"{values[key]} {key}" for key in ("running", "waiting") if key in values]
        if "tokens_per_s" in values:
            parts.append(f"{_number(values['tokens_per_s'])} tokens/s")
        return ", ".join(parts)

    def _actor_text(self, name: str) -> str:
        values = self._of(name)
        known = {"in_flight": "groups in flight", "done": "done", "failed": "failed"}
        return ", ".join(f"{values[key]} {word}" for key, word in known.items() if key in values) or "starting"


class View:
    """Shows a Progress: live in a terminal, else a line every `line_every_s`."""

    def __init__(self, progress: Progress, *, line_every_s: float, console: Console | None = None) -> None:
        self.progress = progress
        self._console = console or Console()
        self._line_every_s = line_every_s
        self._next_line = time.monotonic() + line_every_s
        self._last_line, self._same_since = "", time.monotonic()
        self._warned: set[tuple[str, str]] = set()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)

    def heard(self, source: str, values: Mapping[str, Value]) -> None:
        """Merges one status message; a new warning in it is shown at once."""
        self.progress.update(source, values)
        for warning in str(values.get("warnings", "")).splitlines():
            if (source, warning) not in self._warned:
                self._warned.add((source, warning))
                self.tell(f"inflight launch: {source}: {warning}")

    def refresh(self) -> None:
        """Redraws the view; cheap to call often."""
        if self._live is not None:
            self._live.update(self.progress.render(), refresh=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._line_every_s
            self._print_news()

    def tell(self, text: str) -> None:
        """Prints an event that must be seen, above the live view or among the lines."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _print_news(self) -> None:
        """Skips a line that equals the last one, but not for long: no output would look like a hang."""
        news = self.progress.news()
        if news != self._last_line or time.monotonic() - self._same_since > SAME_LINE_S:
            self._last_line, self._same_since = news, time.monotonic()
            print(self.progress.line(), flush=True)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self.progress.render(), refresh=True)
            self._live.stop()
        else:
            print(self.progress.line(), flush=True)


def _differs(values: Mapping[str, Value]) -> bool:
    """Whether the gate has dropped groups, so that the reward of those trained on is not that of all."""
    return "reward_all" in values and values["reward_all"] != values["reward"]


def _is_finite(value: Value | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Value) -> str:
    """Three significant digits, or the text itself."""
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
