"""How Prometheus finds processes on other hosts: by files that the launcher writes, since they can't."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from inflight.config import RunConfig
from inflight.config.network import parted
from inflight.prometheus.endpoint import ADDRESS, announce, targets_file
from inflight.types import Value


class Targets:
    """The announcements of processes that report where their metrics are and have written no file here themselves."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._written: dict[str, str] = {}
        """Process → the address in its file."""

    def heard(self, name: str, values: Mapping[str, Value]) -> None:
        """Takes the status of a process. A disk that is full costs the announcement alone."""
        address = values.get(ADDRESS)
        if not isinstance(address, str) or self._written.get(name) == address:
            return
        own = targets_file(self._config, name).exists() and name not in self._written
        with contextlib.suppress(ValueError, OSError):
            parted(address)
            if not own:
                announce(self._config, name, address)
                self._written[name] = address

    def ended(self, name: str) -> None:
        """Removes what was written for a process."""
        if self._written.pop(name, None) is not None:
            targets_file(self._config, name).unlink(missing_ok=True)
