"""Files that outlive the trainer: the weights of a version in their wire dtype, and checkpoints to resume from.

Each appears whole or not at all: written under a temporary name, then renamed. Only safetensors and JSON, no pickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from inflight.trainer.checkpoint import rng
from inflight.trainer.checkpoint.companions import copy_companions, plain_generation
from inflight.trainer.checkpoint.index import STATE_FILE, CheckpointError, Saved, all_of, name_of
from inflight.weights.shards import is_sharded, sharded_like
from inflight.weights.source import WIRE_DTYPES, WeightSource

OPTIMIZER_FILE = "trainer/optimizer.safetensors"
RANDOM_FILE = "trainer/random.safetensors"
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def keep_version(source: WeightSource, version: int, path: Path) -> None:
    """Writes the current tensors of `source` in the wire dtype, under checkpoint names; tied parameters once.

    Equal to the published bytes, because packing is the same cast. Not synced to the disk: this survives a killed
    process, not a power cut. Raises OSError when it can't be written; then no part of the file remains.
    """
    tensors = {
        meta.name: tensor.to(WIRE_DTYPES[meta.dtype]).contiguous().cpu()
        for (_, tensor), meta in zip(source, source.metas, strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with _writing(path):
            save_file(tensors, partial, metadata={"version": str(version), "format": "pt"})
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def save_checkpoint(
    folder: Path,
    saved: Saved,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    model_dir: Path,
    together: AbstractContextManager[None] | None = None,
) -> Path:
    """Writes `folder/step-000040`: a model directory (float32) that engines can start from, plus the trainer's state.

    In `trainer/`, `optimizer.safetensors` holds `<parameter>.<state>` tensors, `random.safetensors` the states of
    random number generators, `state.json` the rest (see `index.Saved`). Synced to the disk. If a checkpoint of this
    step exists, only its `state.json` is replaced: the rest is equal. Sharded tensors are gathered inside `together`.
    Raises OSError when it can't be written; then the previous checkpoint is still whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name_of(saved.step)
    if target.exists():
        _replace_state(target, saved)
        return target
    for left in folder.glob("step-*.partial-*"):  # of a writer that was killed
        shutil.rmtree(left, ignore_errors=True)
    with together or nullcontext():
        weights, moments = model_tensors(model), optimizer_tensors(model, optimizer)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=folder))
    try:
        with _writing(target), plain_generation(model):
            model.save_pretrained(partial, state_dict=weights)
        copy_companions(model_dir, partial)
        (partial / STATE_FILE).parent.mkdir()
        with _writing(target):
            save_file(moments, partial / OPTIMIZER_FILE)
            save_file(rng.capture(), partial / RANDOM_FILE)
        (partial / STATE_FILE).write_bytes(_state(saved))
        for path in partial.rglob("*"):
            _to_disk(path)
        partial.chmod(0o755)
        partial.rename(target)
        _to_disk(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _replace_state(checkpoint: Path, saved: Saved) -> None:
    """Groups that were dropped or failed since it was written, without an optimizer step, must not be repeated."""
    path = checkpoint / STATE_FILE
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(_state(saved))
        _to_disk(partial)
        partial.replace(path)
        _to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _state(saved: Saved) -> bytes:
    return msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n"


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:  # safetensors raises it for a full disk
        raise OSError(f"{target} can't be written: {error}") from None


def drop_checkpoints(folder: Path, keep: int, in_use: str = "") -> None:
    """Removes all but the newest `keep` checkpoints (0 keeps all), except the one that this start of the run resumed
    from: a generator that is restarted loads it."""
    for path in all_of(folder)[:-keep] if keep else []:
        if str(path) != in_use:
            shutil.rmtree(path)


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads the optimizer's state from a checkpoint. A parameter without state had no gradient so far (frozen, unused).

    Raises CheckpointError when it is of other parameters.
    """
    tensors = _read(folder / OPTIMIZER_FILE)
    for name, parameter in model.named_parameters():
        names = {key: f"{name}.{key}" for key in _ADAM_STATE}
        if tensors.keys().isdisjoint(names.values()):
            continue
        if not tensors.keys() >= set(names.values()):
            raise CheckpointError(f"{folder / OPTIMIZER_FILE} has no state for {name}")
        state = {key: tensors.pop(full) for key, full in names.items()}
        for key in ("exp_avg", "exp_avg_sq"):
            if state[key].shape != parameter.shape:
                raise CheckpointError(f"{folder / OPTIMIZER_FILE}: {name}.{key} is of another shape than {name}")
        optimizer.state[parameter] = {key: sharded_like(parameter, value) for key, value in state.items()}
    if tensors:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE} has state for {next(iter(tensors))}, which is no parameter")


def load_random(folder: Path) -> None:
    """Restores the state of all random number generators. Raises CheckpointError when the checkpoint has none."""
    path = folder / RANDOM_FILE
    state = _read(path)
    try:
        rng.restore(state)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict. For a sharded model this is a collective of all ranks; rank 0 gets the tensors on its CPU,
    the others get empty ones."""
    kept = model.state_dict(keep_vars=True)
    found = {id(tensor): _whole(tensor) for tensor in {id(each): each for each in kept.values()}.values()}
    return {name: found[id(tensor)] for name, tensor in kept.items()}  # tied parameters stay one tensor


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`<parameter>.<state>` → full tensor; see model_tensors."""
    return {
        f"{name}.{key}": _whole(value).contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if not is_sharded(plain):
        return plain
    gathered: torch.Tensor = plain.full_tensor()  # type: ignore[attr-defined]
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
