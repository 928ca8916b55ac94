"""Which generators get this actor's requests, as the trainer last reported."""

from __future__ import annotations

from collections.abc import Collection

from inflight.types import Routes


class Routing:
    """Written by the actor's loop, read by its pool."""

    def __init__(self) -> None:
        self.routes: Routes | None = None
        """None: nothing was heard yet."""

    def names(self) -> Collection[str]:
        """The generators that get requests."""
        return self.routes.generators.keys() if self.routes is not None else ()

    def url_of(self, generator: str) -> str:
        """The URL of a generator. Raises OSError while it must not get requests."""
        route = self.routes.generators.get(generator) if self.routes is not None else None
        if route is None:
            raise FileNotFoundError(f"{generator} is not among the generators that get requests")
        return route.url
