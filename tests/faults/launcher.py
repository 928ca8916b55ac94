"""The launcher with generators without vLLM, all else real: `python launcher.py KEY=VALUE …` (not a test file)."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from inflight import models
from inflight.bus import BusError
from inflight.config import ConfigError
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.launcher.launch import launch
from inflight.launcher.run_folder import LaunchError
from inflight.trainer.checkpoint.index import CheckpointError

STAND_IN = Path(__file__).parent / "stand_in.py"


def main(overrides: list[str]) -> int:
    config = compose("tiny", ["trainer.compare_start=off", *overrides])  # stand-ins compute nothing
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name=str(models.prepare("tiny"))))
    commands = [
        dataclasses.replace(each, argv=[sys.executable, str(STAND_IN), config.run_dir, each.name])
        if each.kind == "generator"
        else each
        for each in usual_commands(config)
    ]
    try:
        return launch(config, commands)
    except (ConfigError, LaunchError, CheckpointError, BusError) as error:
        print(f"inflight launch: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
