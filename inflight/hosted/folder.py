"""The folder of a process on another host than the trainer's: what a run folder holds for it, and nothing else.

It holds secrets, so it is removed with its process. A process that is killed can't remove it: the next one on this host
does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from inflight import config as configuration
from inflight import models
from inflight.bus.keys import for_owner_alone
from inflight.config import CONFIG_FILE, ModelConfig, RunConfig
from inflight.listening import source_of
from inflight.locked_folder import locked_folder
from inflight.starters.parcel import Parcel

IN_MEMORY = Path("/dev/shm")
PREFIX = "inflight-"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for its owner alone, in memory where that is possible; removed at the end. Raises OSError."""
    parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    with locked_folder(parent, PREFIX) as folder:
        yield folder


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
