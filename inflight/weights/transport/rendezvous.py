"""The small side channel of the CUDA transports: counters and handles in a TCP store on the sender's host.

No weights are sent over it. Every wait has a timeout, and an error names the peer that did not answer.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore

from inflight.weights.transport.base import TransportError, first_line
from inflight.weights.transport.timeout import within

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
_POLL_S = 0.0005
_GRACE_S = 0.5
"""Additional seconds for the end of a wait that has a timeout of its own."""


class KeyValueStore:
    """Keys and values shared by the sender (which hosts them) and the receivers."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address`: that of the sender's store; empty to host one on a free loopback port."""
        self.timeout_s = timeout_s
        self._closed = threading.Event()
        try:
            if address:
                name, _, port = address.rpartition(":")
                self.tcp = within(timeout_s, functools.partial(joined, name, int(port), timeout_s))
            else:
                number, self.tcp = hosted(timeout_s)
                address = f"{LOOPBACK}:{number}"
        except (OSError, RuntimeError, ValueError) as error:
            raise TransportError(f"connect: no rendezvous at {address!r}: {first_line(error)}") from None
        self.address = address

    def put(self, key: str, value: bytes) -> None:
        """Publishes a value. The first call after the host's death does not fail: see `confirm`."""
        self._ask(lambda: self.tcp.set(key, value.hex()), "", f"rendezvous {self.address}")

    def reply(self, key: str, value: bytes, who: str, phase: str) -> None:
        """Like `confirm`, then publishes a value: both within one timeout."""

        def call() -> None:
            self.tcp.check([""])
            self.tcp.set(key, value.hex())

        self._ask(call, f"{phase}: ", who)

    def take(self, key: str, who: str, phase: str, *, drop: bool = False) -> bytes:
        """Waits for a value, and with `drop` deletes it. Raises TransportError, with `who` and `phase`, when it is not
        there in time."""

        def poll() -> bytes:
            deadline = time.monotonic() + self.timeout_s
            # Polled: a blocking wait would hold the store's connection, and could not be interrupted.
            while not self.tcp.check([key]):
                if self._closed.is_set():
                    raise TransportError(f"{phase}: closed while waiting for {who}")
                if time.monotonic() > deadline:
                    raise TransportError(f"{phase}: {who} did not answer within {self.timeout_s:g} s")
                time.sleep(_POLL_S)
            value = bytes.fromhex(self.tcp.get(key).decode())
            if drop:
                self.tcp.delete_key(key)
            return value

        return self._ask(poll, f"{phase}: ", who, self.timeout_s + _GRACE_S)

    def confirm(self, who: str, phase: str, limit_s: float | None = None) -> None:
        """Sends one request to the host, which is alive if it answers. Raises TransportError, with `who` and `phase`,
        when it does not within `limit_s`, by default the store's timeout."""
        self._ask(lambda: self.tcp.check([""]), f"{phase}: ", who, limit_s)

    def close(self) -> None:
        """Ends every wait of this side."""
        self._closed.set()

    def drop(self, key: str) -> None:
        """Deletes a value that is not needed any more."""
        self._ask(lambda: self.tcp.delete_key(key), "", f"rendezvous {self.address}")

    def _ask(self, call: Callable[[], T], phase: str, who: str, limit_s: float | None = None) -> T:
        """A call of the store with a timeout. Raises TransportError."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        try:
            return within(limit_s, call)
        except TransportError:
            raise
        except TimeoutError:
            raise TransportError(f"{phase}{who} did not answer within {limit_s:g} s") from None
        except RuntimeError as error:
            raise TransportError(f"{phase}{who} is gone: {first_line(error)}") from None


def hosted(timeout_s: float = 300.0) -> tuple[int, TCPStore]:
    """A store of this process on a loopback port: (port, store). Raises OSError or RuntimeError when that fails."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    # By its own socket: given a host name, the store would listen on every interface.
    return port, TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def joined(name: str, port: int, timeout_s: float) -> TCPStore:
    """A connection to another process's store; has no timeout if that is suspended. Raises OSError or RuntimeError."""
    # The store exists before its address is sent: refused means gone. TCPStore's client would retry until its timeout.
    socket.create_connection((name, port), timeout=timeout_s).close()
    return TCPStore(name, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
