"""Whether a model's directory holds all of its weights. Reads headers, not tensors, and imports no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from inflight.models.weight_files import ADAPTER, ADAPTER_WEIGHTS, INDEX, WHOLE
from inflight.trainer.checkpoint.index import CheckpointError


class _Index(msgspec.Struct):
    """Where each tensor of a model in several files is."""

    weight_map: dict[str, str]


def require_whole(directory: Path) -> None:
    """Raises CheckpointError naming a file of weights that is missing, is torn or can't be read, or a tensor that the
    index has and its file has not."""
    if (directory / INDEX).is_file():
        placed = _placed(directory / INDEX)
    else:
        adapter = (directory / ADAPTER).is_file()
        placed = {ADAPTER_WEIGHTS if adapter else WHOLE: set[str]()}
    for file, expected in sorted(placed.items()):
        if missing := sorted(expected - _tensors(directory / file)):
            raise CheckpointError(f"{directory} is not whole: {file} has no {missing[0]}, which {INDEX} places there")


def _placed(index: Path) -> dict[str, set[str]]:
    """File of the directory → tensors that an index places in it. Raises CheckpointError."""
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index} can't be read: {error}") from None
    placed: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if Path(file).name != file:
            raise CheckpointError(f"{index} places {tensor} in {file!r}, which is no file beside it")
        placed.setdefault(file, set()).add(tensor)
    return placed


def _tensors(file: Path) -> set[str]:
    """Names of a file's tensors. Raises CheckpointError."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return set(opened.keys())
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} is not whole: it has no {file.name}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.parent} is not whole: {file.name} can't be read: {error}") from None
