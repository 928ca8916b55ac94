"""The digest of the weights that an adapter is trained on and added to.

An adapter is worth something over its own base alone, and a generator with another one would serve it without any
error. So trainer and generators each compute a digest of the weights in their own copy of the model's directory. It is
over every byte of every tensor: a sample could not tell a base from one that was fine-tuned elsewhere. It does not
depend on how the tensors are distributed over files, nor on metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from inflight.models.weight_files import INDEX, WHOLE

BASE_DIGEST = "inflight_base"
"""Where an adapter's checkpoint names its base's digest: metadata of its safetensors file."""
FILES_AT_ONCE = 4
"""Files that are hashed at the same time, each by a thread of its own."""


def base_digest(folder: Path) -> str:
    """SHA-256, 64 hex digits, over name, dtype, shape and SHA-256 of each tensor of a model directory, in the order of
    names. In a directory without safetensors: over name and SHA-256 of each `*.bin` file.

    Reads all weights once: 15 GB in files of 5 take some 10 s from the page cache, with SHA instructions. Raises
    ValueError when there are no weights or their index is damaged, OSError or SafetensorError for a file that can't be
    read.
    """
    files = _safetensors(folder)
    read, found = (_tensors, files) if files else (_whole_file, sorted(folder.glob("*.bin")))
    if not found:
        raise ValueError(f"{folder} holds no weights, neither safetensors nor *.bin")
    with ThreadPoolExecutor(FILES_AT_ONCE, "base digest") as pool:
        lines = sorted(line for part in pool.map(lambda path: list(read(path)), found) for line in part)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def require_base(adapter: Path, digest: str, folder: Path) -> None:
    """Raises ValueError when an adapter's safetensors file names another base than that of `digest`, in `folder`. One
    that names none fits any."""
    from safetensors import safe_open

    with safe_open(adapter, framework="pt") as file:
        named = (file.metadata() or {}).get(BASE_DIGEST, digest)
    if named != digest:
        raise ValueError(f"{adapter} was trained on another base ({named[:12]}) than {folder} holds ({digest[:12]})")


def _safetensors(folder: Path) -> list[Path]:
    """The files that loaders read: those of the index, or the whole one, or all that there are."""
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / INDEX} can't be read: {error!r}") from None
    whole = folder / WHOLE
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _tensors(path: Path) -> Iterator[str]:
    """A line for each tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            tensor = file.get_tensor(name)
            sha = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
            yield f"{name} {tensor.dtype} {list(tensor.shape)} {sha}"


def _whole_file(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        yield f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}"
