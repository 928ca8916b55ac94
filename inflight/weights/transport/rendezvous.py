"""The small side channel of the CUDA transports: counters and handles in a TCP store of the sender's process.

No weights are sent over it. Every wait has a timeout, and an error names the peer that did not answer. torch's stores
don't authenticate: one listens on the process's own address alone (config/network.py), until all ranks are connected,
and the keys of each sender have a random prefix, which the ranks get over the control socket.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, TCPStore

from inflight.config.network import NetworkConfig, joined, parted
from inflight.error_line import first_line
from inflight.listening import listen
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.timeout import within

T = TypeVar("T")
HERE = NetworkConfig()
"""Loopback alone."""
_POLL_S = 0.0005
_GRACE_S = 0.5
"""Additional seconds for the end of a wait that has a timeout of its own."""


class KeyValueStore:
    """Keys and values shared by the sender (which hosts them) and the receivers."""

    def __init__(self, address: str, timeout_s: float, network: NetworkConfig = HERE) -> None:
        """`address`: that of the sender's store, HOST:PORT/PREFIX; empty to host one on this process's `network`.

        Raises TransportError when there is none, or when none can be opened.
        """
        self.timeout_s = timeout_s
        self._closed = threading.Event()
        self._hosted: HostedStore | None = None
        """None: another process hosts it."""
        try:
            if address:
                place, prefix = split(address)
                tcp = within(timeout_s, functools.partial(connected, place, timeout_s))
            else:
                self._hosted = HostedStore(network, timeout_s)
                tcp = self._hosted.tcp
                prefix = secrets.token_hex(8)
                address = f"{self._hosted.place}/{prefix}"
            self.tcp = PrefixStore(prefix, tcp)
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

    def shut(self) -> None:
        """Frees the port, when all ranks are connected: later connections are refused, those of the ranks stay. No
        effect on a rank's side, and when it was done before."""
        if self._hosted is not None:
            self._hosted.shut()

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


def split(address: str) -> tuple[str, str]:
    """HOST:PORT and the prefix of a rendezvous. Raises ValueError for any other text."""
    place, _, prefix = address.partition("/")
    parted(place)
    if not prefix.isalnum():
        raise ValueError(f"{address!r} has no prefix")
    return place, prefix


class HostedStore:
    """A store of this process, on a port of its own. It lives as long as this object or its `tcp` is referenced."""

    def __init__(self, network: NetworkConfig = HERE, timeout_s: float = 300.0) -> None:
        """Raises OSError or RuntimeError when it can't be opened."""
        listening = listen(network)
        port = listening.getsockname()[1]
        self.place = joined(network.reached, port)
        """HOST:PORT by which others reach it."""
        self._descriptor: int | None = listening.detach()
        # By its own socket: given a host name, the store would listen on every interface.
        self.tcp = TCPStore(
            network.address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=self._descriptor,
        )

    def shut(self) -> None:
        """Frees the port; connections that exist stay. torch's store can only close both together. So something that
        never becomes readable takes the place of its listening socket, under the same descriptor, which the store
        closes at its end."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            silent = os.eventfd(0, os.EFD_CLOEXEC)
            os.dup2(silent, descriptor, inheritable=False)
            os.close(silent)


def connected(place: str, timeout_s: float) -> TCPStore:
    """A connection to another process's store at HOST:PORT; has no timeout if that process is suspended. Raises OSError
    or RuntimeError."""
    host, port = parted(place)
    # The store exists before its address is sent: refused means gone. TCPStore's client would retry until its timeout.
    socket.create_connection((host, port), timeout=timeout_s).close()
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
