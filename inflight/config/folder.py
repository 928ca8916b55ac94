"""A run folder: names of its files that several rooms use, and which run a checkpoint is of."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_FILE = "config.yaml"
"""The run's configuration, in each run folder."""
LOCK_FILE = "lock"
"""Locked by the launcher and inherited by the run's processes: it is free once all have ended."""
ENVIRONMENT_FILE = "environment.json"
"""What the run's last start was started on, and when: `started`, as STARTED_FORMAT (launcher/environment.py)."""
STARTED_FORMAT = "%Y-%m-%d %H:%M:%S %z"
AUDIT_FILE = "audit.json"
"""The verdict of `inflight audit`."""


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in, as `checkpoints/step-000040` or `best/step-000040`; None for one
    elsewhere.

    The checkpoint may be named by a link, and the folder that holds it may be one.
    """
    for path in (Path(os.path.abspath(checkpoint)), checkpoint.resolve()):  # resolve() leaves a linked `checkpoints/`
        if (path.parent.parent / CONFIG_FILE).is_file():
            return path.parent.parent
    return None
