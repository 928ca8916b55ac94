"""The store of this process at which its gloo groups are formed. It does not ask for a key, so it listens only while
one of them is to be formed: a group needs it no more afterwards."""

from __future__ import annotations

import secrets
import threading

from inflight.config.network import NetworkConfig
from inflight.error_line import first_line
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.rendezvous import HostedStore


class MeetingStore:
    """One for all groups, so that a thousand generators take no thousand ports. Thread-safe."""

    def __init__(self, network: NetworkConfig) -> None:
        self._network = network
        self._lock = threading.Lock()
        self._hosted: HostedStore | None = None
        self._expected: set[str] = set()
        """Rendezvous of groups that are to be formed."""

    def expect(self) -> str:
        """The rendezvous of a new group: HOST:PORT of the store, which is opened if it is not, and the prefix of the
        group's keys. Raises TransportError when it can't be opened."""
        with self._lock:
            if self._hosted is None:
                self._hosted = self._opened()
            rendezvous = f"{self._hosted.place}/{secrets.token_hex(8)}"
            self._expected.add(rendezvous)
            return rendezvous

    def settle(self, rendezvous: str, formed: bool) -> None:
        """A group is formed, and its ranks are connected with each other, or it will not be. The store is closed when
        a group is formed and no other one is to be; ranks that are late for a group that was given up find it there
        until then."""
        with self._lock:
            self._expected.discard(rendezvous)
            if formed and not self._expected:
                self._hosted = None

    def _opened(self) -> HostedStore:
        try:
            return HostedStore(self._network)
        except (OSError, RuntimeError) as error:
            raise TransportError(f"open: no store on {self._network.address}: {first_line(error)}") from None
