"""The configuration of a resumed run: the one that it began with, plus values that the user has set again."""

from __future__ import annotations

from typing import cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inflight import config as configuration
from inflight.config import ConfigError, RunConfig, schema
from inflight.error_line import one_line
from inflight.launcher.differences import FIXED, Difference, of_options, refuse
from inflight.metrics import SUMMARY_FILE
from inflight.models import is_of_hub

OF_EACH_START = ("run_dir", "resume", "checkpoint")
"""Options that are always taken from the new start."""


def resumed_config(asked: RunConfig) -> RunConfig:
    """The configuration with which to resume the run in `asked.run_dir`. Returns `asked` itself when there is no such
    run, or when it is unknown which of its values were set.

    A value is taken from `asked` where the user has set it (`RunConfig.chosen`), else from the run's own config.yaml:
    a default that has changed since does not change a run that has begun. Values that must not change are refused in
    differences.py. Raises ConfigError when the run's configuration can't be read, or is of another task or of another
    model of the hub.
    """
    if not asked.resume or asked.chosen is None or not (asked.path / configuration.CONFIG_FILE).is_file():
        return asked
    before = configuration.load(asked.path)
    anew = [name for name in asked.chosen if name not in OF_EACH_START]
    early = [*_of_other_task(before, asked), *_of_other_model(before, asked)]
    if early:
        names = [name for name in FIXED if name in anew and not name.startswith("model.")]
        refuse(before, [*early, *of_options(before, asked, names)])
    return _merged(before, asked, anew)


def _of_other_task(before: RunConfig, asked: RunConfig) -> list[Difference]:
    """Another task: its options can't be merged with those of the run's own."""
    if asked.task.name == before.task.name:
        return []
    return [Difference(f"task.name={asked.task.name!r} is not allowed", repr(before.task.name))]


def _of_other_model(before: RunConfig, asked: RunConfig) -> list[Difference]:
    """Another model of the hub, before it is downloaded. Other models are compared by their directories, which have to
    be made first (run_folder.py)."""
    name = asked.model.name
    if "model.name" not in (asked.chosen or ()) or not is_of_hub(name) or name == before.model.name:
        return []
    was = before.model.served_name or before.model.name
    return [Difference(f"model.name={name} is not allowed", f"{was}; resume it with the options of its start")]


def set_anew(now: RunConfig) -> list[str]:
    """`name=value` for each value that the user has set for this start and that differs from the run's own. Must be
    called before the folder's configuration is written."""
    if not (now.path / configuration.CONFIG_FILE).is_file():
        return []
    ours = OmegaConf.structured(now)
    theirs = OmegaConf.structured(configuration.load(now.path))
    values = {
        name: OmegaConf.select(ours, name)
        for name in now.chosen or ()
        if name not in OF_EACH_START and OmegaConf.select(ours, name) != OmegaConf.select(theirs, name)
    }
    return [f"{name}={value}" for name, value in values.items()]


def forget_end(config: RunConfig) -> None:
    """Removes the result that the run's last end has left: it counts steps that are taken back."""
    (config.path / SUMMARY_FILE).unlink(missing_ok=True)


def _merged(before: RunConfig, asked: RunConfig, names: list[str]) -> RunConfig:
    values = OmegaConf.structured(asked)
    merged = OmegaConf.merge(schema(), OmegaConf.to_container(OmegaConf.structured(before)))
    for name in (*OF_EACH_START, *names):
        OmegaConf.update(merged, name, OmegaConf.select(values, name), merge=False, force_add=True)
    merged.chosen = sorted({*(before.chosen or ()), *names})
    try:
        return cast(RunConfig, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{asked.path}: {one_line(error)}") from None
