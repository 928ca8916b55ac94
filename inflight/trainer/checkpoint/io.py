"""Files that outlive the trainer: the weights of a version in their wire dtype, and checkpoints to resume from.

Each appears whole or not at all: written under a temporary name, then renamed. Only safetensors and JSON, no pickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from inflight.base_digest import BASE_DIGEST
from inflight.trainer.checkpoint import rng
from inflight.trainer.checkpoint.companions import (
    copy_companions,
    dtype_of,
    mode_of_new,
    note_dtype,
    plain_generation,
    readable,
)
from inflight.trainer.checkpoint.index import STATE_FILE, CheckpointError, Saved, all_of, name_of
from inflight.trainer.checkpoint.snapshot import Snapshot
from inflight.weights.shards import sharded_like
from inflight.weights.source import WIRE_DTYPES, WeightSource

OPTIMIZER_FILE = "trainer/optimizer.safetensors"
RANDOM_FILE = "trainer/random.safetensors"
MASTER_FILE = "trainer/master.safetensors"
SHARD_BYTES = 5_000_000_000
"""Of a file of weights, as in most models of the hub."""
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def keep_version(source: WeightSource, version: int, path: Path) -> None:
    """Writes the current tensors of `source` in the wire dtype, under checkpoint names; tied parameters once. Those of
    an adapter name the digest of their base.

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
            base = {BASE_DIGEST: source.base} if source.base else {}
            mode = mode_of_new(partial)
            save_file(tensors, partial, metadata={"version": str(version), "format": "pt", **base})
            partial.chmod(mode)  # as the run's other files: an audit may be another user's
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def save_checkpoint(
    folder: Path,
    saved: Saved,
    snapshot: Snapshot,
    model: PreTrainedModel,
    model_dir: Path,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes `folder/step-000040`: a model directory that transformers and vLLM load, plus the trainer's state.

    The weights are in `dtype`, in files of at most `shard_bytes` with an index if there are several. In `trainer/`,
    `optimizer.safetensors` holds `<parameter>.<state>` tensors, `random.safetensors` the states of random number
    generators, `state.json` the rest (see `index.Saved`); `master.safetensors` holds the float32 weights if `dtype` is
    another one. Of `model`, only class and configuration are read. Synced to the disk. Raises OSError when it can't be
    written; then the previous checkpoint is still whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name_of(saved.step)
    for left in folder.glob("step-*.partial-*"):  # of a writer that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=folder))
    try:
        with _writing(target), plain_generation(model):
            weights = _cast(snapshot.weights, WIRE_DTYPES[dtype])
            model.save_pretrained(partial, state_dict=weights, max_shard_size=shard_bytes)
        note_dtype(partial, dtype)
        copy_companions(model_dir, partial)
        (partial / STATE_FILE).parent.mkdir()
        with _writing(target):
            save_file(snapshot.moments, partial / OPTIMIZER_FILE)
            save_file(snapshot.random, partial / RANDOM_FILE)
            if dtype != "float32":
                save_file(_once(snapshot.weights), partial / MASTER_FILE)
        (partial / STATE_FILE).write_bytes(_state(saved))
        readable(partial)
        for path in partial.rglob("*"):
            _to_disk(path)
        partial.chmod(0o755)
        partial.rename(target)
        _to_disk(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floats in another dtype; tied parameters stay one tensor."""
    found = {id(each): each.to(dtype) if each.is_floating_point() else each for each in tensors.values()}
    return {name: found[id(each)] for name, each in tensors.items()}


def _once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under the first of its names."""
    first: dict[int, str] = {}
    for name, each in tensors.items():
        first.setdefault(id(each), name)
    return {name: tensors[name] for name in first.values()}


def replace_books(checkpoint: Path, saved: Saved) -> None:
    """Replaces the `state.json` of a checkpoint of the same step; the rest is equal. Groups that were dropped or failed
    since it was written, without an optimizer step, must not be repeated. Raises OSError."""
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


@torch.no_grad()
def load_master(folder: Path, model: nn.Module) -> None:
    """Gives a model that was loaded from a checkpoint's rounded weights those in float32; without rounded ones there is
    nothing to do. Raises CheckpointError when they are missing, or of another model."""
    path = folder / MASTER_FILE
    if not path.exists():
        stored = dtype_of(folder)
        if stored != "float32":
            text = f"{folder} holds weights in {stored} and no {MASTER_FILE}"
            raise CheckpointError(f"{text}: a run can't resume from it")
        return
    tensors = _read(path)
    kept = {id(each): (name, each) for name, each in reversed(model.state_dict(keep_vars=True).items())}
    for name, parameter in kept.values():
        value = tensors.pop(name, None)
        if value is None or value.shape != parameter.shape:
            raise CheckpointError(f"{path} has no {name}, or one of another shape")
        parameter.detach().copy_(sharded_like(parameter, value))
    if tensors:
        raise CheckpointError(f"{path} has {next(iter(tensors))}, which is no parameter")


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


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
