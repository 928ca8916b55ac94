"""Moves what a link receives into an event loop: a link's `receive` blocks its thread."""

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
