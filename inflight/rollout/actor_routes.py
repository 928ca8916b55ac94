"""Which routes each actor was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from inflight.types import Routes


class ActorRoutes:
    """The routes to the generators, as a source gives them now, and the actors that have not been sent these yet."""

    def __init__(self, source: Callable[[], Routes]) -> None:
        self._source = source
        self._sent: dict[str, Routes | None] = {}

    def want(self, actor: str) -> None:
        """An actor needs them, whether it was sent any or not: a message may have been lost."""
        self._sent[actor] = None

    def forget(self, actor: str) -> None:
        """An actor is gone."""
        self._sent.pop(actor, None)

    def unsent(self) -> Iterator[tuple[str, Routes]]:
        """Each actor that was sent other ones, with those of now, which count as sent from then on."""
        routes = self._source()
        for actor in [actor for actor, sent in self._sent.items() if sent != routes]:
            self._sent[actor] = routes
            yield actor, routes
