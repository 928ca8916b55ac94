"""Files of a model's directory that are copied into each checkpoint: tokenizer, templates, code and generation
settings."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.npz",
    "*.index.json",
)
"""Names of files with weights, or with an index of them: a checkpoint writes its own."""
GENERATION = "generation_config.json"
"""Not copied from what `plain_generation` writes: without this file, the end tokens are those of config.json."""
CONFIG = "config.json"
"""Written by the checkpoint itself, since its dtype differs."""
LARGEST = 256 << 20
"""Bytes above which a file is not copied, whatever its name."""


def copy_companions(source: Path, target: Path) -> None:
    """Copies all files except weights, by content: files of a cache are links. Subfolders are skipped, except for chat
    templates, and so are hidden files. Removes generation settings from `target` if `source` has none. Raises
    OSError."""
    (target / GENERATION).unlink(missing_ok=True)
    files = [*source.iterdir(), *source.glob("additional_chat_templates/*")]
    for file in files:
        name = file.relative_to(source)
        weights = any(name.match(pattern) for pattern in WEIGHTS) or name == Path(CONFIG)
        if not file.is_file() or weights or name.name.startswith(".") or file.stat().st_size > LARGEST:
            continue
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target / name)


def readable(directory: Path) -> None:
    """Gives files of safetensors, which makes them with mode 0600, the mode that the umask gives other files: a server
    may run as another user. Raises OSError."""
    made = directory / ".mode"
    mode = mode_of_new(made)
    made.unlink()
    for file in directory.rglob("*.safetensors"):
        file.chmod(mode)


def mode_of_new(path: Path) -> int:
    """Makes an empty file, in place of one that is there; returns the mode that the umask gives it. Raises OSError."""
    path.unlink(missing_ok=True)
    path.touch()  # asking for the umask would change it for all threads
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """While open, the model has transformers' default generation settings, which can always be written; those of its
    directory, which transformers reads but may refuse to write, are copied as a file."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def dtype_of(directory: Path) -> str:
    """The dtype of a directory's weights, by its configuration; float32 where that says nothing, as transformers does.

    Raises OSError or ValueError when the configuration can't be read.
    """
    values = json.loads((directory / CONFIG).read_bytes())
    if not isinstance(values, dict):
        raise ValueError(f"{CONFIG} holds {type(values).__name__}, not an object")
    return str(values.get("dtype") or values.get("torch_dtype") or "float32")


def note_dtype(directory: Path, dtype: str) -> None:
    """Writes the dtype of its weights into a directory's configuration; an adapter's directory has none. Raises OSError
    or ValueError."""
    if not (directory / CONFIG).exists():
        return
    values = json.loads((directory / CONFIG).read_bytes())
    values.pop("torch_dtype", None)  # its older name
    text = json.dumps(values | {"dtype": dtype}, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")
