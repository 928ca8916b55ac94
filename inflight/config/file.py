"""The configuration as a file of the run folder, and its schema for OmegaConf and Hydra."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inflight.config import release
from inflight.config.checks import ConfigError
from inflight.config.folder import CONFIG_FILE
from inflight.config.model import ModelConfig
from inflight.config.rollout import TaskConfig
from inflight.config.run import RunConfig
from inflight.error_line import one_line


def schema() -> DictConfig:
    """RunConfig for OmegaConf and Hydra: typed, no unknown keys, and writable though the dataclasses are frozen.

    Nodes of frozen dataclasses are read-only, and merging does not remove that flag everywhere.
    """
    root = cast(DictConfig, OmegaConf.structured(RunConfig))
    OmegaConf.set_readonly(root, False)
    root.model = OmegaConf.structured(ModelConfig)
    root.task = OmegaConf.structured(TaskConfig)
    for key in root:
        if not OmegaConf.is_missing(root, key) and isinstance(root[key], DictConfig):
            OmegaConf.set_readonly(root[key], False)
    for name in ("lora", "objective", "schedule", "advantage"):
        OmegaConf.set_readonly(root.trainer[name], False)
    OmegaConf.set_readonly(root.eval.sampling, False)
    options = (root.task.options, *(root.trainer[name].options for name in ("objective", "schedule", "advantage")))
    generator = (root.generator.extra, root.generator.server)
    for free in (*options, root.task.contents, *generator, root.launch.affinity):
        OmegaConf.set_struct(free, False)  # these take any key
    return root


def load(run_dir: str | Path) -> RunConfig:
    """The configuration of a run folder, as the launcher wrote it; its `run_dir` is the folder's current place.

    Options that the folder does not have, because its release did not, get their defaults. Raises ConfigError that
    names the file and the field when something is missing, unknown or of the wrong type, and the release that wrote the
    folder if it is another one.
    """
    path = Path(run_dir) / CONFIG_FILE
    try:
        given = OmegaConf.load(path)
        if not given:
            raise ConfigError(f"{path} holds no options: the command that was to write it failed")
        merged = OmegaConf.merge(schema(), given, {"run_dir": os.path.abspath(run_dir)})
        return cast(RunConfig, OmegaConf.to_object(merged))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist: {run_dir} is not a run folder") from None
    except ConfigError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        field_name = getattr(error, "full_key", None)
        reason = one_line(str(error).split("full_key:")[0]) + release.remark(Path(run_dir))
        raise ConfigError(f"{path}: {field_name + ': ' if field_name else ''}{reason}") from None


def as_text(config: RunConfig) -> str:
    """What config.yaml holds: the release, and all options with their values."""
    return release.HEADER + OmegaConf.to_yaml(OmegaConf.structured(config))


def save(config: RunConfig) -> None:
    """Writes the resolved configuration, and the release, into the run folder; on OSError, nothing is written."""
    config.path.mkdir(parents=True, exist_ok=True)
    partial = config.path / f"{CONFIG_FILE}.partial"
    try:
        partial.write_text(as_text(config))
        partial.replace(config.path / CONFIG_FILE)
    finally:
        partial.unlink(missing_ok=True)
