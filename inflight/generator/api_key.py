"""Requires the API key of the generators on every path; vLLM's own check leaves paths open that run the model."""

from __future__ import annotations

import hmac
from typing import Any

OPEN = ("/health", "/metrics")
"""Paths without a key on loopback: they reveal nothing about prompts or completions and start no work."""
OPEN_TO_HOSTS = ("/health",)
"""Paths without a key on an address that other hosts can reach."""
_REFUSED = b'{"error":"a key is needed: Authorization: Bearer ..."}'


class ApiKey:
    """An ASGI application that forwards requests with the right key to another one, and answers 401 to all others."""

    def __init__(self, app: Any, key: str, without: tuple[str, ...] = OPEN) -> None:
        """`without`: paths that need no key."""
        self._app = app
        self._expected = f"Bearer {key}".encode()
        self._open = without

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI 3: called for each connection."""
        if scope["type"] == "lifespan" or scope["path"] in self._open or self._has_key(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
