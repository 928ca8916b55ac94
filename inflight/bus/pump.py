"""What a link receives, in an event loop: a link's own `receive` blocks its thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from inflight.bus.endpoint import BusError
from inflight.bus.link import Link
from inflight.messages import AnyMessage

POLL_S = 0.1
"""How often the thread looks whether it should end."""


@contextlib.contextmanager
def pumped(link: Link, put: Callable[[AnyMessage | BusError], None], name: str) -> Iterator[None]:
    """A thread called `name` has the running event loop call `put` with each message, and with the BusError that ends
    the link. The thread ends with the context, the link or the loop."""
    loop = asyncio.get_running_loop()
    ended = threading.Event()

    def hand_over(event: AnyMessage | BusError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: its owner has ended
            loop.call_soon_threadsafe(put, event)

    def pump() -> None:
        while not ended.is_set():
            try:
                message = link.receive(POLL_S)
            except BusError as error:
                hand_over(error)
                return
            if message is not None:
                hand_over(message)

    threading.Thread(target=pump, name=name, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Arrivals:
    """The messages of a link for the one coroutine that reads it, with no thread between the socket's and the loop: a
    thread that only passes a message on waits for the GIL, which the loop of a busy server holds."""

    def __init__(self, link: Link) -> None:
        """Must be made inside the event loop that reads."""
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        link.arrived = self._wake

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: its owner has ended
            self._loop.call_soon_threadsafe(self._came.set)

    async def receive(self, timeout_s: float) -> AnyMessage | None:
        """As Link.receive: the next message, or None when nothing came within `timeout_s`. Raises BusError."""
        self._came.clear()
        message = self._link.receive(0)
        if message is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            message = self._link.receive(0)
        return message
