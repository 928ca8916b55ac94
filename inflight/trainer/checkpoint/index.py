"""Which checkpoint a run resumes from, and its data other than tensors. Imports no torch: the launcher reads it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from inflight.config import release, run_of
from inflight.rollout.books import Books
from inflight.types import Count

FOLDER = "checkpoints"
STATE_FILE = "trainer/state.json"
"""In a subfolder, as all files that are not the model's: vLLM loads any safetensors file beside a model as weights."""
SCHEMA = 1
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that a run can't resume from; one line that names it."""


class Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state that a trainer resumes from, in addition to model, optimizer and random numbers."""

    schema: int
    step: Count
    """Number of steps done, which is the version of the weights."""
    elapsed_s: float
    """Elapsed time of the run in seconds, for metrics.jsonl."""
    books: Books


class _Schema(msgspec.Struct):
    """The field of a state that all schemas share."""

    schema: int


def name_of(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def step_of(path: str | Path) -> int:
    """The step of a checkpoint's folder. Raises CheckpointError for any other folder."""
    match = _NAME.fullmatch(Path(path).name)
    if match is None:
        raise CheckpointError(f"{path} is no checkpoint: the name of one is {name_of(40)}")
    return int(match[1])


def all_of(folder: Path) -> list[Path]:
    """The checkpoints in it, oldest first. Each is whole, because it appears by a rename. Other names are ignored."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def newest(run_dir: Path) -> Path | None:
    """The checkpoint with the most steps; None before the first."""
    return next(reversed(all_of(run_dir / FOLDER)), None)


def read(folder: Path) -> Saved:
    """Raises CheckpointError when the folder holds no checkpoint of this schema, so that a run can't resume from it."""
    path = folder / STATE_FILE
    run = run_of(folder)
    remark = "" if run is None else release.remark(run)
    try:
        state = path.read_bytes()
        schema = msgspec.json.decode(state, type=_Schema).schema
        if schema != SCHEMA:
            raise CheckpointError(f"{path} is of schema {schema}, this release reads schema {SCHEMA}{remark}")
        saved = msgspec.json.decode(state, type=Saved)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}{remark}") from None
    if saved.step != step_of(folder):
        raise CheckpointError(f"{path} is of step {saved.step}, which is not that of the folder's name")
    return saved
