"""What a user has set, as against what is a default: on the command line, or in a configuration file of their own.

Two things depend on it. A value that was set and can't have an effect is refused, where a default of the same value is
none of the user's business (config/effect.py). And a run that goes on keeps the configuration that it began with,
except for what is set anew (launcher/resume.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from inflight.config import RunConfig

OWN = "main"
"""Hydra's word for files of the folder that it was started with."""


def chosen(name: str, overrides: Sequence[str], *, own_folder: bool) -> list[str]:
    """Dotted names of the values that `overrides` set and, with `own_folder`, the files that configuration `name` is
    made of, those aside that come with this package. To be called where Hydra has been initialized with the folder."""
    found = set(_of_overrides(overrides))
    if own_folder:
        found.update(_of_files(name, overrides))
    sections = {each.name for each in fields(RunConfig)}
    return sorted(each for each in found if each.partition(".")[0] in sections)  # groups of files are none


def _of_overrides(overrides: Sequence[str]) -> Iterator[str]:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete():
            yield from _leaves(override.key_or_group, override.value())


def _of_files(name: str, overrides: Sequence[str]) -> Iterator[str]:
    loader = GlobalHydra.instance().config_loader()
    for each in loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults:
        file = loader.repository.load_config(each.config_path)  # type: ignore[attr-defined]
        if file is not None and file.provider == OWN:
            yield from _leaves(each.package or "", OmegaConf.to_container(file.config))


def _leaves(name: str, value: Any) -> Iterator[str]:
    """A list, and a mapping with nothing in it, is a value itself."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif name:
        yield name
