"""The small side channel of the CUDA transports: counters and handles in a TCP store on the sender's host.

Nothing here carries weights. Every wait is bounded, and an error names who did not answer.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from inflight.weights.transport.base import TransportError

LOOPBACK = "127.0.0.1"
_POLL_S = 0.0005


class Board:
    """Keys and values shared by the sender (which hosts them) and the receivers."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address`: where the sender's board is; empty to host one on a free loopback port."""
        self.timeout_s = timeout_s
        self._closed = threading.Event()
        limit = timedelta(seconds=timeout_s)
        try:
            if address:
                name, _, port = address.rpartition(":")
                self.store = TCPStore(name, int(port), wait_for_workers=False, timeout=limit)
            else:
                listening = socket.create_server((LOOPBACK, 0))
                address = f"{LOOPBACK}:{listening.getsockname()[1]}"
                # By its own socket: given a host name, the store would listen on every interface.
                self.store = TCPStore(
                    LOOPBACK, listening.getsockname()[1], is_master=True, wait_for_workers=False,
                    timeout=limit, master_listen_fd=listening.detach(),
                )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            raise TransportError(f"connect: no rendezvous at {address!r}: {str(error).splitlines()[0]}") from None
        self.address = address

    def put(self, key: str, value: bytes) -> None:
        """Publishes a value."""
        try:
            self.store.set(key, value.hex())
        except RuntimeError as error:
            raise TransportError(f"rendezvous {self.address} is gone: {str(error).splitlines()[0]}") from None

    def take(self, key: str, who: str, phase: str) -> bytes:
        """Waits for a value. Raises TransportError naming `who` and `phase` when it does not come in time."""
        deadline = time.monotonic() + self.timeout_s
        try:
            # Polled: a blocking wait would hold the store's connection, and could not be told to stop.
            while not self.store.check([key]):
                if self._closed.is_set():
                    raise TransportError(f"{phase}: closed while waiting for {who}")
                if time.monotonic() > deadline:
                    raise TransportError(f"{phase}: {who} did not answer within {self.timeout_s:g} s")
                time.sleep(_POLL_S)
            return bytes.fromhex(self.store.get(key).decode())
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"{phase}: {who} is gone: {str(error).splitlines()[0]}") from None

    def close(self) -> None:
        """Ends every wait of this side."""
        self._closed.set()

    def drop(self, key: str) -> None:
        """Forgets a value that nobody needs any more."""
        self.store.delete_key(key)
