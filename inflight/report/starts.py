"""The starts of a run: how long each has trained, and how long the run lay still between them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from inflight.config.folder import ENVIRONMENT_FILE, STARTED_FORMAT

RESUMED_S = 1.0
"""Between the lines of two starts of a trainer at least so much time has passed that `time_s` does not count."""


def seconds(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """From the first step of each start to its last one. The lines' clock starts with the trainer; the time before a
    start's first step is left out."""
    if not steps:
        return None
    each = (float(lines[-1]["time_s"]) - float(lines[0]["time_s"]) + _first_step_s(lines) for lines in _of(steps))
    return sum(each)


def paused_s(steps: Sequence[Mapping[str, Any]], first_without_a_step: float = math.inf) -> float:
    """Seconds between the last step of a start and the first one of the next start, over all starts;
    `first_without_a_step` is when a last start that has made no step began to sample, in Unix time."""
    found = _of(steps)
    pairs = itertools.pairwise(found)
    between = (float(later[0]["time"]) - _first_step_s(later) - float(before[-1]["time"]) for before, later in pairs)
    still = first_without_a_step - float(found[-1][-1]["time"]) if found and "time" in found[-1][-1] else math.inf
    return sum(between) + (still if math.isfinite(still) else 0.0)


def without_a_step(run_dir: Path, steps: Sequence[Mapping[str, Any]]) -> float:
    """When the run's last start began, in Unix time, if a start before it has made steps and it has made none itself;
    infinite otherwise, and where that is not recorded."""
    try:
        text = json.loads((run_dir / ENVIRONMENT_FILE).read_bytes())["started"]
        began = datetime.strptime(text, STARTED_FORMAT).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
    last = steps[-1].get("time") if steps else None
    return began if isinstance(last, int | float) and last < began else math.inf


def _of(steps: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The lines of each start of the trainer: while it runs, `time` and `time_s` advance together. Without `time`,
    which older runs do not have, all lines are taken for those of one start."""
    found: list[list[Mapping[str, Any]]] = []
    began = -math.inf
    for step in steps:
        clock = float(step["time"]) - float(step["time_s"]) if "time" in step else began
        if not found or clock - began > RESUMED_S:
            found.append([])
        found[-1].append(step)
        began = clock
    return found


def _first_step_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a start's first step, until its line."""
    return sum(float(lines[0][phase]) for phase in ("wait_s", "train_s", "publish_wait_s", "pack_s"))
