"""Where the figures of a run are shown, beside its own files."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from inflight.config.checks import ConfigError, require

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Each is the name of its package and of the extra of inflight that installs it."""


def require_known(trackers: Sequence[str]) -> None:
    """Raises ConfigError for a tracker that does not exist, or is named twice."""
    for name in trackers:
        require(name in TRACKERS, "trackers", name, ", ".join(TRACKERS))
    require(len(set(trackers)) == len(trackers), "trackers", list(trackers), "each of them once")


def require_installed(trackers: Sequence[str]) -> None:
    """Raises ConfigError for a tracker whose package is not there."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"trackers={name} is not installed: pip install 'inflight[{name}]'")
