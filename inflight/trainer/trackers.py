"""The figures of a run in TensorBoard, Weights & Biases or MLflow, through accelerate's trackers.

They get what metrics.jsonl and eval.jsonl get (docs/metrics.md), from a thread of their own: a service that is slow
or gone costs its figures, and no step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from inflight.config import RunConfig
from inflight.error_line import one_line

log = logging.getLogger(__name__)

TRACKERS_FOLDER = "trackers"
WAITING = 1000
"""Lines that may wait to be taken; further ones are dropped and counted."""
CLOSE_S = 10.0
"""What the trackers get at the end of a run to take what still waits."""


class Accelerated(Protocol):
    """What is needed of an accelerate.Accelerator that was made with `log_with`."""

    def init_trackers(self, project_name: str, config: dict[str, Any], init_kwargs: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int) -> None: ...

    def end_training(self) -> None: ...


class Trackers:
    """Owns the thread. The first error of a tracker ends it, with a warning: the run continues without."""

    def __init__(self, config: RunConfig, accelerator: Accelerated, warn: Callable[[str], None]) -> None:
        """Begins a run in each of `config.trackers`; `warn` takes a line for the user."""
        self._accelerator = accelerator
        self._warn = warn
        self._lines: queue.Queue[tuple[int, Mapping[str, object]] | None] = queue.Queue(WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, args=(config,), name="trackers", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Queues the numbers of a line; never waits."""
        try:
            self._lines.put_nowait((step, values))
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Lets the trackers take what waits, within CLOSE_S. A second call does nothing."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("the trackers do not end within %g s; what they have not taken is lost", CLOSE_S)
        if self._dropped:
            log.error("the trackers were too slow for %d lines", self._dropped)

    def _run(self, config: RunConfig) -> None:
        try:
            self._accelerator.init_trackers(config.tracker_project, _settings(config), _named(config))
            while (line := self._lines.get()) is not None:
                step, values = line
                self._accelerator.log(dict(numbers(values)), step=step)
            self._accelerator.end_training()
        except Exception as error:  # foreign services, and the libraries that speak with them
            log.exception("the trackers have failed")
            self._warn(f"trackers={','.join(config.trackers)}: {one_line(error)}; the run continues without")


def numbers(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float | int]]:
    """The numbers of a line by name: those of a mapping within it as `name/key`, without texts and lists."""
    for name, value in values.items():
        if isinstance(value, bool):
            yield prefix + name, int(value)
        elif isinstance(value, int | float):
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from numbers({str(key): inner for key, inner in value.items()}, f"{prefix}{name}/")


def _named(config: RunConfig) -> dict[str, Any]:
    """What names the run within the project, by tracker; TensorBoard names runs by their folder."""
    name = config.path.resolve().name
    known = {"wandb": {"name": name, "dir": str(config.path)}, "mlflow": {"run_name": name}}
    return {tracker: known[tracker] for tracker in config.trackers if tracker in known}


def _settings(config: RunConfig) -> dict[str, Any]:
    """The configuration, flat: `trainer.steps` → its value; what is no plain value as text."""
    found: dict[str, Any] = {}

    def take(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                take(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            found[prefix] = value if isinstance(value, bool | int | float | str) else str(value)

    take("", dataclasses.asdict(config))
    return found
