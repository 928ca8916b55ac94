"""The folder of a process on another host than the trainer's: what a run folder holds for it, and nothing else.

It holds secrets, so it is removed with its process. A process that is killed can't remove it: the next one on this host
does. As long as its process lives, its lock is held, and says which process of which run it is.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from inflight import config as configuration
from inflight import models
from inflight.bus.keys import for_owner_alone
from inflight.config import CONFIG_FILE, ModelConfig, RunConfig
from inflight.listening import source_of
from inflight.locked_folder import is_held, locked_folder, locks_of
from inflight.starters.parcel import Parcel

IN_MEMORY = Path("/dev/shm")
PREFIX = "inflight-"
_POLL_S = 0.1


def _parent() -> Path:
    return IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def private_folder(process: str = "") -> Iterator[Path]:
    """A folder for its owner alone, in memory where that is possible; removed at the end. `process`: whose it is, as
    `named` has it. Raises OSError."""
    with locked_folder(_parent(), PREFIX, process) as folder:
        yield folder


class Predecessors:
    """Generators on this host of the run and the name of one that is about to be started: a launcher that has lost one
    starts it anew, while the lost one lives and has its GPUs until its lease ends. Actors have none."""

    def __init__(self, parcel: Parcel) -> None:
        """Those that live now: must be called before the folder of the new one is made. Raises OSError when the
        trainer's network can't be reached."""
        self._locks = locks_of(_parent(), PREFIX, named(parcel)) if parcel.kind == "generator" else []

    def ended(self, within_s: float) -> bool:
        """Waits for their ends. False when one still lives after `within_s`."""
        deadline = time.monotonic() + within_s
        while any(map(is_held, self._locks)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def named(parcel: Parcel) -> str:
    """A process of a run on this host, with the host's address, since containers may share the parent of these folders.
    Raises OSError when the trainer's network can't be reached."""
    return f"{parcel.name} of {parcel.run} at {parcel.trainer} on {source_of(parcel.trainer)}"


@contextlib.contextmanager
def unpacked_folder(parcel: Parcel) -> Iterator[RunConfig]:
    """Makes the folder, for its owner alone, and yields the configuration in it; removes it at the end.

    Raises ConfigError for a configuration that can't be used here, OSError when the trainer's network can't be reached
    or nothing can be written.
    """
    with private_folder(named(parcel)) as folder:
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
    """The run's configuration as it is on this host: its own address and keys, the trainer's address. Versions come
    from the trainer, also the one of a checkpoint from which it resumes."""
    return replace(
        config,
        resume=False,
        checkpoint="",
        bus=replace(config.bus, address=parcel.trainer, keys=str(config.path / "keys")),
        network=replace(config.network, bind=source_of(parcel.trainer), advertise=""),
    )


def with_model(config: RunConfig) -> RunConfig:
    """The configuration with this host's own copy of the model, which is downloaded or made where it is not there.
    Raises ModelError."""
    return replace(config, model=_model(config.model))


def _model(model: ModelConfig) -> ModelConfig:
    """The launcher names a model that is not of the hub by its directory there, which this host need not have."""
    absent = Path(model.name).is_absolute() and not Path(model.name).is_dir()
    name = model.served_name if absent and model.served_name else model.name
    models.fetch(name, model.revision, trust_remote_code=model.trust_remote_code)
    if models.is_of_hub(name):
        return model
    return replace(model, name=str(models.prepare(name)))
