"""A version that one generator keeps for a while, because what is asked of it then must be answered under one version.

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
    """Wanted until a generator holds `version`, then that generator's, then ended. To be read under the loop's lock."""

    version: int
    due: float
    """When it ends at the latest, begun or not, in the clock's seconds."""
    routed: bool
    """Whether the actors may send requests to the generator meanwhile, which are answered at that age."""
    generator: str = field(default="", init=False)
    """Which one has it; empty while none does."""
    route: Route | None = field(default=None, init=False)
    """Where that one serves, and which start of it has the pin."""
    ended: str = field(default="", init=False)
    """Why it is over; empty while it is not."""

    @property
    def wanted(self) -> bool:
        """Whether it is still to be given to a generator."""
        return not self.generator and not self.ended

    def begin(self, generator: str, route: Route) -> None:
        """A generator stamps the version, and keeps it from now on."""
        self.generator, self.route = generator, route
        log.info("%s keeps version %d", generator, self.version)

    def end(self, reason: str) -> None:
        """It is over; only the first reason counts."""
        if not self.ended:
            self.ended = reason
            log.info("version %d is not pinned any more: %s", self.version, reason)
