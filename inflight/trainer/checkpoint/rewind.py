"""Truncates the files of a run to a checkpoint, so that no step is recorded twice."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inflight.config import RunConfig
from inflight.metrics import EVAL_FILE, EVAL_GIVEN_UP, METRICS_FILE, SWAPS_FILE, read_lines
from inflight.rollout.books import NO_BOOKS
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.restore import restore
from inflight.rollout.waiting import StoredGroup
from inflight.trainer.checkpoint.index import SCHEMA, Saved, read

log = logging.getLogger(__name__)


def begin(config: RunConfig) -> tuple[Saved, list[StoredGroup]]:
    """The state in which this start of the run begins, and the groups still to be trained on; truncates the folder's
    files to it.

    Raises CheckpointError, StreamError or ValueError naming a file that is damaged, OSError when the disk is full.
    """
    begun = Saved(schema=SCHEMA, step=0, elapsed_s=0.0, books=NO_BOOKS)
    if config.checkpoint:
        begun = read(Path(config.checkpoint))
    if not config.resume:
        return begun, []
    rewind(config, begun.step)
    waiting = restore(config.path / ROLLOUTS_FILE, begun.books, begun.step)
    log.info("resuming from step %d, %d groups wait to be trained on", begun.step, len(waiting))
    return begun, waiting


def rewind(config: RunConfig, step: int) -> None:
    """Removes data of later steps: lines of metrics.jsonl, eval.jsonl and swaps.jsonl, kept versions. Safe to repeat.
    An evaluation of this step that was given up is removed as well, since the step is evaluated again.

    Raises ValueError when a line is damaged (other than the last, which may be torn), OSError when the disk is full.
    """
    _cut(config.path / METRICS_FILE, "step", step)
    _cut(config.path / EVAL_FILE, "step", step, lambda line: line.get("step") == step and EVAL_GIVEN_UP in line)
    _cut(config.path / SWAPS_FILE, "version", step - 1)  # the checkpoint's version is sent, and recorded, again
    for path in config.version_file(0).parent.glob("*.safetensors"):
        if path.stem.isdigit() and int(path.stem) > step:
            path.unlink()


def _cut(path: Path, key: str, step: int, undone: Callable[[dict[str, Any]], bool] = lambda line: False) -> None:
    """Keeps the lines whose `key` is at most `step` and that are not `undone`; the file is replaced atomically."""
    if not path.exists():
        return
    lines = read_lines(path)
    try:
        kept = [line for line in lines if int(line.get(key, 0)) <= step and not undone(line)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: a line is damaged, its {key} is no number: {error}") from None
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(line, separators=(", ", ": ")) + "\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)
