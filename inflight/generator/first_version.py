"""Refuses requests until a publisher's first version is live: earlier tokens would come from unversioned weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from inflight.generator.agent import Commits

WORKLESS = ("GET", "HEAD", "OPTIONS")
"""HTTP methods that never run the model."""
_NOT_YET = b'{"error":"no version of a publisher is live yet: retry once the trainer has sent its first"}'


class FirstVersion:
    """An ASGI application that forwards requests to another one once `commits` has a version; until then it answers 503
    to requests that may run the model."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.commits: Commits | None = None
        """Set to the engine agent's as soon as it listens to a publisher."""
        self._warming_up = False

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """While open, forwards the generator's own warm-up requests; its address is not published yet."""
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
