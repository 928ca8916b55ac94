"""A version that one generator keeps for a while, so that a series of requests is answered under one version.

Versions are still sent to the generator meanwhile. The newest one waits in its shadow, and is committed when the pin
ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from inflight.types import Route

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Pin:
    """Wanted until a generator holds `version`, then held by that generator, then ended. Read it under the loop's
    lock."""

    version: int
    due: float
    """Time at which it ends at the latest, begun or not, in the clock's seconds."""
    routed: bool
    """Whether actors may send requests to the generator meanwhile, which are then answered by a stale version."""
    generator: str = field(default="", init=False)
    """The generator that holds it; empty before."""
    route: Route | None = field(default=None, init=False)
    """That generator's address, and which start of it holds the pin."""
    ended: str = field(default="", init=False)
    """Why it has ended; empty before."""

    @property
    def wanted(self) -> bool:
        """Whether it is still waiting for a generator."""
        return not self.generator and not self.ended

    def begin(self, generator: str, route: Route) -> None:
        """A generator that stamps the version keeps it from now on."""
        self.generator = generator
        self.route = route
        log.info("%s keeps version %d", generator, self.version)

    def end(self, reason: str) -> None:
        """Ends it; only the first reason is recorded."""
        if not self.ended:
            self.ended = reason
            log.info("version %d is not pinned any more: %s", self.version, reason)
