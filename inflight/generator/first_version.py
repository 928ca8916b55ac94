"""No tokens before a publisher's first version is live: they would come from weights that no publisher knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from inflight.generator.agent import Commits

WORKLESS = ("GET", "HEAD", "OPTIONS")
"""HTTP methods that never run the model."""
_NOT_YET = b'{"error":"no version of a publisher is live yet: ask again once the trainer has sent its first"}'


class FirstVersion:
    """An ASGI application that passes requests on to another once `commits` has a version; before that it answers 503
    to those that may run the model."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.commits: Commits | None = None
        """The engine's, as soon as it listens to a publisher."""
        self._warming_up = False

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Meanwhile it passes on what the generator asks of itself; nobody else has been told where it serves."""
        self._warming_up = True
        try:
            yield
        finally:
            self._warming_up = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI 3: called for each connection."""
        live = self.commits is not None and self.commits.version is not None
        if live or self._warming_up or scope["type"] == "lifespan" or scope.get("method") in WORKLESS:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _NOT_YET})
        else:
            await send({"type": "websocket.close", "code": 1013})
