"""Which generators may be asked for rollouts, and the file by which the actors know."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from inflight.types import Route, Routes
from inflight.weights.publish.delivery import Delivery, State

log = logging.getLogger(__name__)

ROUTED = (State.IDLE, State.SENDING, State.ABORTING, State.COMMITTING)
"""STALLED and UNSURE are not: who does not answer us may not answer requests either."""


def routes(newest: int, deliveries: Iterable[Delivery], max_behind: int) -> Routes:
    """Those that take part, have held a version that was the newest at its time, and are not too far behind."""
    routed = {
        delivery.generator: Route(url=delivery.url, version=version, incarnation=delivery.incarnation or "")
        for delivery in deliveries
        if delivery.state in ROUTED
        and delivery.caught_up
        and (version := delivery.committed) is not None
        and newest - version <= max_behind
    }
    return Routes(version=newest, generators=routed)


class RoutesFile:
    """Written whenever the routes change; a reader sees the old file or the new one, never a part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Routes | None = None
        self._failed = False

    def write(self, wanted: Routes) -> None:
        """Does nothing when `wanted` is what the file holds. A disk that is full is logged once and tried again."""
        if wanted == self._written:
            return
        partial = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(wanted))
            os.replace(partial, self._path)
        except OSError as error:
            if not self._failed:
                log.error("%s can't be written, actors go on with what it held: %s", self._path, error)
            self._failed = True
        else:
            self._written, self._failed = wanted, False
