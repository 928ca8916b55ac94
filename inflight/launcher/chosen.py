"""Distinguishes values that the user has set, on the command line or in a configuration file, from defaults.

Two things depend on it. A value that was set and has no effect is refused, while an equal default is accepted
(config/effect.py). And a resumed run keeps the configuration that it began with, except for values that are set again
(launcher/resume.py).
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
"""Hydra's name for the folder of configurations that it was started with."""


def chosen(name: str, overrides: Sequence[str], *, own_folder: bool) -> list[str]:
    """Dotted names of the values that `overrides` set and, with `own_folder`, those set in the files that configuration
    `name` is composed of, except files shipped with this package. Call it while Hydra is initialized with the
    folder."""
    found = set(_of_overrides(overrides))
    if own_folder:
        found.update(_of_files(name, overrides))
    sections = {each.name for each in fields(RunConfig)}
    return sorted(each for each in found if each.partition(".")[0] in sections)  # without names of config groups


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
    """A list and an empty mapping count as values."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif name:
        yield name
