"""What a model's directory holds beside its weights, in each of its checkpoints: tokenizer, templates, code, and how to
generate, as they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.npz",
    "*.index.json",
)  # fmt: skip
"""Names of what holds weights, or says which file does: a checkpoint has its own."""
GENERATION = "generation_config.json"
"""What `plain_generation` writes is none of the model's: without one, the end tokens are those of config.json."""
CONFIG = "config.json"
"""A checkpoint's own, too: its dtype is another."""
LARGEST = 256 << 20
"""Bytes: beyond, a file is no companion, whatever it is called."""


def copy_companions(source: Path, target: Path) -> None:
    """Copies all that is not weights, by content: files of a cache are links. Folders are not looked into, except for
    chat templates, and hidden files are left. Generation settings in `target` that `source` has none of are removed.
    Raises OSError."""
    (target / GENERATION).unlink(missing_ok=True)
    files = [*source.iterdir(), *source.glob("additional_chat_templates/*")]
    for file in files:
        name = file.relative_to(source)
        weights = any(name.match(pattern) for pattern in WEIGHTS) or name == Path(CONFIG)
        if not file.is_file() or weights or name.name.startswith(".") or file.stat().st_size > LARGEST:
            continue
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target / name)


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model has transformers' own generation settings, which can always be written; those of its directory,
    which transformers reads but may refuse to write, are a companion."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
