"""Which generators may get requests, and the file that tells the actors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from inflight.types import Routes
from inflight.weights.publish.replica import Replica

log = logging.getLogger(__name__)


def routes(newest: int, replicas: Iterable[Replica], max_behind: int) -> Routes:
    """The generators that are present, have held a version that was the newest at its time, and are not too far behind.
    A pinned generator does not count as behind; the pin decides whether it gets requests."""
    routed = {
        each.generator: route
        for each in replicas
        if each.state.routed
        and each.caught_up
        and (route := each.route) is not None
        and (each.pin.routed if each.pin is not None else newest - route.version <= max_behind)
    }
    return Routes(version=newest, generators=routed)


class RoutesFile:
    """Writes the file whenever the routes change; a reader sees the old file or the new one, never a part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Routes | None = None
        self._failed = False

    def write(self, wanted: Routes) -> None:
        """Does nothing when the file holds `wanted` already. A full disk is logged once, and writing is retried."""
        if wanted == self._written:
            return
        partial = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(wanted))
            os.replace(partial, self._path)
        except OSError as error:
            if not self._failed:
                log.error("%s can't be written, actors keep using its last contents: %s", self._path, error)
            self._failed = True
        else:
            self._written = wanted
            self._failed = False
