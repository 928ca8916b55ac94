"""The folder of a process on another host than the trainer's: what a run folder holds for it, and nothing else.

It holds secrets, so it is removed with its process. A process that is killed can't remove it: the next one on this host
does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from inflight import config as configuration
from inflight import models
from inflight.bus.keys import for_owner_alone
from inflight.config import CONFIG_FILE, ModelConfig, RunConfig
from inflight.listening import source_of
from inflight.starters.parcel import Parcel

IN_MEMORY = Path("/dev/shm")
PREFIX = "inflight-"
LOCK = "process.lock"
"""Locked for as long as the process of a folder lives."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for its owner alone, in memory where that is possible; removed at the end. Raises OSError."""
    parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        new = folder / f"{LOCK}.new"
        with os.fdopen(os.open(new, os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(folder / LOCK)  # under this name it is always locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of this user's processes that were killed."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if path.parent.lstat().st_uid == os.getuid():
                with path.open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
                    shutil.rmtree(path.parent, ignore_errors=True)


@contextlib.contextmanager
def unpacked_folder(parcel: Parcel) -> Iterator[RunConfig]:
    """Makes the folder, for its owner alone, and yields the configuration in it; removes it at the end.

    Raises ConfigError or ModelError for a configuration that can't be used here, OSError when the trainer's network
    can't be reached or nothing can be written.
    """
    with private_folder() as folder:
        with for_owner_alone():
            (folder / CONFIG_FILE).write_text(parcel.config)
            config = _here(parcel, configuration.load(folder))
            _write_secrets(parcel, config)
            configuration.save(config)
        yield config


def _write_secrets(parcel: Parcel, config: RunConfig) -> None:
    """Where `config` has them."""
    config.api_key_file.parent.mkdir()
    config.api_key_file.write_text(parcel.api_key + "\n")
    keys = Path(config.bus.keys)
    keys.mkdir()
    for name, content in parcel.keys.items():
        (keys / name).write_text(content)


def _here(parcel: Parcel, config: RunConfig) -> RunConfig:
    """The run's configuration as it is on this host: its own address and keys, the trainer's address, its own copy of
    the model. Versions come from the trainer, also the one of a checkpoint from which it resumes."""
    return replace(
        config,
        resume=False,
        checkpoint="",
        model=_model(config.model),
        bus=replace(config.bus, address=parcel.trainer, keys=str(config.path / "keys")),
        network=replace(config.network, bind=source_of(parcel.trainer), advertise=""),
    )


def _model(model: ModelConfig) -> ModelConfig:
    """The launcher names a model that is not of the hub by its directory there, which this host need not have."""
    absent = Path(model.name).is_absolute() and not Path(model.name).is_dir()
    name = model.served_name if absent and model.served_name else model.name
    models.fetch(name, model.revision, trust_remote_code=model.trust_remote_code)
    if models.is_of_hub(name):
        return model
    return replace(model, name=str(models.prepare(name)))
