"""Files that outlive the trainer: the weights of a version as they travelled, and checkpoints to go on from.

Each appears whole or not at all: written beside its place, then renamed. Only safetensors and JSON, no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from inflight.weights.source import WIRE_DTYPES, WeightSource

# What a model's directory holds besides weights and what save_pretrained writes: tokenizer and chat template.
_COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.jinja")


def keep_version(source: WeightSource, version: int, path: Path) -> None:
    """Writes what `source` holds now, cast as it travels, under checkpoint names; tied parameters once.

    Equal to the published bytes, because packing is the same cast. Not forced to the disk: it guards against a
    killed process, not against a power cut.
    """
    tensors = {
        meta.name: tensor.to(WIRE_DTYPES[meta.dtype]).contiguous().cpu()
        for (_, tensor), meta in zip(source, source.metas, strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"version": str(version), "format": "pt"})
    partial.rename(path)


def save_checkpoint(
    folder: Path, step: int, model: PreTrainedModel, optimizer: torch.optim.Optimizer, model_dir: Path
) -> Path:
    """`folder/step-000040`: a model directory (float32) that a run can start from, and the optimizer beside it.

    `optimizer.safetensors` holds `<parameter>.<state>` tensors, `trainer.json` the step. Forced to the disk. Raises
    OSError when it can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{step:06d}"
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=folder))
    try:
        model.save_pretrained(partial)
        for pattern in _COMPANIONS:
            for file in model_dir.glob(pattern):
                shutil.copy(file, partial)
        save_file(_optimizer_tensors(model, optimizer), partial / "optimizer.safetensors")
        (partial / "trainer.json").write_text(json.dumps({"step": step}) + "\n")
        for file in partial.iterdir():
            _to_disk(file)
        partial.chmod(0o755)
        if target.exists():  # the same step again, from a run that was continued
            shutil.rmtree(target)
        partial.rename(target)
        _to_disk(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
