"""A run folder: what tells it from any other, and which one a checkpoint is of."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_FILE = "config.yaml"
"""The run's configuration, in each run folder."""


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in, as `checkpoints/step-000040` or `best/step-000040`; None for one
    elsewhere.

    The checkpoint may be named by a link, and the folder that holds it may be one.
    """
    for path in (Path(os.path.abspath(checkpoint)), checkpoint.resolve()):  # resolve() leaves a linked `checkpoints/`
        if (path.parent.parent / CONFIG_FILE).is_file():
            return path.parent.parent
    return None
