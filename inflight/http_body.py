"""The body of an HTTP answer, bounded."""

from __future__ import annotations

import aiohttp


async def bounded_body(response: aiohttp.ClientResponse, most_bytes: int, too_large: Exception) -> bytes:
    """The whole body. Raises `too_large` as soon as it has more than `most_bytes`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            raise too_large
    return bytes(body)
