"""Composes a checked RunConfig from the name of a configuration and overrides; Hydra does the merging."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from inflight.config import ConfigError, RunConfig, require, schema
from inflight.config.refused import REFUSED
from inflight.error_line import one_line
from inflight.file_path import why_impossible
from inflight.launcher.chosen import chosen
from inflight.nearest_name import meant
from inflight.resources import folder

ENTRY = re.compile(r"[+~]*([a-z_.]+?)(?:\.\d+|\[\d+\])(?:[.=]|$)")
"""An override of one entry of a list, or of a value in one; the list's name."""
KINDS = {
    "could not be converted to Integer": "a whole number is needed",
    "could not be converted to Float": "a number is needed",
    "is not a valid bool": "true or false is needed",
    "not Optional": "a value is needed, not null",
    "Incompatible value 'None'": "a value is needed, not null",
    "is not a ListConfig": "a list is needed",
    "to string": "a text is needed",
    "is not a subclass of": "options by name are needed, {NAME: VALUE, …}",
}
"""Part of what OmegaConf says of a value of another kind → what is needed."""


def compose(name: str, overrides: Sequence[str] = (), directory: Path | None = None) -> RunConfig:
    """The configuration `name` with overrides, validated; `run_dir` becomes absolute, a new name unless it is given.

    Raises ConfigError with one line for an unknown name, key or value and for a damaged file.
    """
    ConfigStore.instance().store(name="schema", node=schema(), provider="inflight")
    own = folder("configs")
    asked = list(overrides)
    if directory is not None:
        if not directory.is_dir():
            raise ConfigError(f"--config-dir {directory}: there is no such folder")
        asked.append(f"hydra.searchpath=[file://{own}]")
    try:
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str((directory or own).resolve()), version_base="1.3"):
            composed = hydra.compose(name, asked)
            names = chosen(name, asked, own_folder=directory is not None)
        if OmegaConf.is_missing(composed, "run_dir"):
            composed.run_dir = str(Path("runs") / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{name}")
        config = cast(RunConfig, OmegaConf.to_object(composed))
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(_said(error, [own] if directory is None else [own, directory]), 1000)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}.yaml, or a file it includes, is not YAML: {one_line(error)}") from None
    except FrozenInstanceError as error:  # Hydra lets a + add any key
        unknown = f"a + can't add a key that is not known: {one_line(error)}"
        raise ConfigError(f"{unknown}, in {' '.join(overrides)}") from None
    except (ValueError, TypeError) as error:  # Hydra's own, for an override without a key, and ~ with a list's entry
        entry = next(filter(None, map(_of_entry, overrides)), "")
        raise ConfigError(entry or f"can't read {' '.join(overrides)}: {one_line(error)}") from None
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{name}.yaml does not start from the schema: begin its defaults with `- schema`")
    require(not config.checkpoint, "checkpoint", config.checkpoint, "the launcher finds it, with resume=true")
    require(not config.chosen, "chosen", config.chosen, "the launcher determines it")
    require(not config.task.contents, "task.contents", config.task.contents, "the launcher determines it")
    return replace(config, run_dir=str(_resolved(config)), chosen=names)


def _resolved(config: RunConfig) -> Path:
    allowed = why_impossible(config.run_dir)
    require(not allowed, "run_dir", config.run_dir, allowed)
    try:
        return config.path.expanduser().resolve()
    except RuntimeError as error:  # an unknown user's home, or, before Python 3.13, a loop of symbolic links
        raise ConfigError(f"run_dir={config.run_dir!r} is not allowed: {one_line(error)}") from None


def configurations(folders: Sequence[Path]) -> list[str]:
    """The names that `--config-name` takes, in order."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _said(error: Exception, folders: Sequence[Path]) -> str:
    """Messages of Hydra and OmegaConf without their explanations, and with the available names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OverrideParseException):
        wrong = lines[0] if "=" in error.override else "it takes KEY=VALUE"
        return _of_entry(error.override) or f"can't read {error.override!r}: {wrong}"
    if isinstance(error, MissingConfigException):
        said = lines[0].removesuffix(" Check that it's in your config search path.").removesuffix(".")
        if error.options:
            return f"{said}; there are: {', '.join(error.options)}"
        *shipped, searched = folders  # where a user's folder is given, Hydra looks for it in there alone
        there = f" in {searched}" if shipped else ""
        otherwise = f"; without --config-dir: {', '.join(configurations(shipped))}" if shipped else ""
        return f"{said}{there}; the configurations are: {', '.join(configurations([searched])) or 'none'}{otherwise}"
    cause = error.__cause__ or error.__context__  # the latter for an error in a file
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key and is_dataclass(cause.object_type):
        groups = {file.parent.name: file.parent for folder in folders for file in sorted(folder.glob("[!._]*/*.yaml"))}
        file = lines[0].partition(":")[0] + ": " if lines[0].startswith("In ") else ""
        return file + _unknown(cause.full_key, cause.object_type, groups)
    override = lines[0].removeprefix("Error merging override ") if lines else ""
    if entry := _of_entry(override):
        return entry
    if isinstance(cause, ValidationError) and lines:
        file = lines[0].partition(":")[0] + ": " if lines[0].startswith("In ") else ""
        return _wrong_kind(cause, override if override != lines[0] else "", file)
    if cause is not None and str(cause) and lines and override != lines[0]:
        return f"{override} is not allowed: {str(cause).splitlines()[0]}"
    if cause is not None and str(cause):
        return f"{lines[0]} ({str(cause).splitlines()[0]})" if lines else str(cause).splitlines()[0]
    return lines[0] if lines else type(error).__name__


def _of_entry(override: str) -> str:
    """What is wrong with an override of one entry of a list; empty for any other override."""
    entry = ENTRY.match(override)
    if entry is None:
        return ""
    example = "[{name: numeric_match}, {name: my_rewards.py:short, weight: 0.5}]" if entry[1] == "rewards" else "[…]"
    instead = f"give the whole list, '{entry[1]}={example}', or change it in the configuration's file"
    return f"{override} is not allowed: entries of {entry[1]} can't be set singly; {instead}"


def _unknown(full_key: str, kind: type, groups: Mapping[str, Path]) -> str:
    """An error for a key that `kind` has no field for, with the closest name, else all names; `groups`, the folders of
    files to choose from, are top level."""
    if full_key in REFUSED:
        return f"{full_key} is not an option: {REFUSED[full_key]}"
    if full_key in groups:
        ways = f"name it in the file's defaults, `- {full_key}: NAME`, or on the command line, {full_key}=NAME"
        return f"{full_key} is not set by a key: {ways}; there are: {', '.join(configurations([groups[full_key]]))}"
    section, _, key = full_key.rpartition(".")
    names = [each.name for each in fields(kind)] + ([] if section else list(groups))
    near = meant(key, names, f"{section}." if section else "")
    return f"{full_key} is not known; {near or 'known: ' + ', '.join(names)}"


def _wrong_kind(error: ValidationError, override: str, file: str) -> str:
    """An error for a value of another kind than its option takes, with the override or the file that it is from."""
    said = str(error).splitlines()[0]
    allowed = next((needed for part, needed in KINDS.items() if part in said), said)
    value = f"{error.full_key}={one_line(error.value, 200)}"
    if not override:
        return f"{file}{value} is not allowed: {allowed}" if error.full_key else f"{file.strip(': ')} ({said})"
    of_override = not error.full_key or error.full_key == override.partition("=")[0].lstrip("+")
    return f"{override} is not allowed: {allowed}" + ("" if of_override else f" for {value}")
