"""Which checkpoint a run goes on from, and what it says beside the weights. Imports no torch: the launcher reads it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from inflight.rollout.books import Books
from inflight.types import Count

FOLDER = "checkpoints"
STATE_FILE = "trainer/state.json"
"""In a folder of its own, as all that is not the model's: vLLM takes any safetensors beside a model for its weights."""
SCHEMA = 1
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that a run can't go on from; one line that names it."""


class Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer goes on with, beside model, optimizer and random numbers."""

    schema: int
    step: Count
    """Steps done; the version of the weights."""
    elapsed_s: float
    """The run's clock, for metrics.jsonl."""
    books: Books


def name_of(step: int) -> str:
    """Folder of a step's checkpoint."""
    return f"step-{step:06d}"


def step_of(path: str | Path) -> int:
    """The step of a checkpoint's folder. Raises CheckpointError for any other folder."""
    match = _NAME.fullmatch(Path(path).name)
    if match is None:
        raise CheckpointError(f"{path} is no checkpoint: the name of one is {name_of(40)}")
    return int(match[1])


def all_of(folder: Path) -> list[Path]:
    """The checkpoints in it, oldest first. Each is whole: it appears by being renamed. Another name is not ours."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def newest(run_dir: Path) -> Path | None:
    """The checkpoint with the most steps; None before the first."""
    return next(reversed(all_of(run_dir / FOLDER)), None)


def read(folder: Path) -> Saved:
    """Raises CheckpointError when the folder holds no checkpoint of this schema that a run can go on from."""
    path = folder / STATE_FILE
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    if saved.schema != SCHEMA or saved.step != step_of(folder):
        raise CheckpointError(f"{path} is of schema {saved.schema} and step {saved.step}, not of {SCHEMA} and its name")
    return saved
