"""A run folder as its launcher leaves it, for what is given to other hosts (not a test file)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inflight import config as configuration
from inflight.bus import make_keys
from inflight.config import RunConfig

API_KEY = "k" * 43


def written_run(config: RunConfig, folder: Path, **bus: object) -> RunConfig:
    """Writes the folder: keys of two generators and an actor, the configuration, the API key. `bus`: further values."""
    make_keys(folder / "keys", ["trainer", "a0", "g0", "g1"])
    made = replace(config, run_dir=str(folder), bus=replace(config.bus, keys=str(folder / "keys"), **bus))
    configuration.save(made)
    made.api_key_file.parent.mkdir()
    made.api_key_file.write_text(API_KEY + "\n")
    return made
