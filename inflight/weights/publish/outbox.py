"""Messages from a publisher to the members of its generators, and a count of those from them that are ignored."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from inflight.bus import BusError
from inflight.messages import AnyMessage, Refused
from inflight.messages.base import MAX_REASON

log = logging.getLogger(__name__)


class Postbox(Protocol):
    """The methods that are needed of a bus.Listener; any thread may call them."""

    def send(self, peer: str, message: AnyMessage) -> None: ...

    def peers(self) -> set[str]: ...


class Outbox:
    """Queues messages for peers. A disconnected peer is reported by the bus as lost, where it is handled."""

    def __init__(self, postbox: Postbox) -> None:
        self._postbox = postbox
        self.ignored: Counter[str] = Counter()
        """Messages that did not fit the state, by type."""

    def send(self, peers: Iterable[str], message: AnyMessage) -> None:
        """Queues a message for each peer, in the order of the calls."""
        for peer in peers:
            try:
                self._postbox.send(peer, message)
            except BusError as error:
                log.warning("%s", error)

    def send_refusal(self, peer: str, reason: str) -> None:
        """Refuses a peer, if it is connected: it ends for this reason."""
        self.send({peer} & self.peers(), Refused(reason=reason[:MAX_REASON]))

    def peers(self) -> set[str]:
        """Peers that are connected."""
        return self._postbox.peers()

    def ignore(self, peer: str, message: AnyMessage, reason: str) -> None:
        """Counts and logs a message without effect."""
        self.ignored[type(message).__name__] += 1
        log.warning("%s from %s is ignored: %s", type(message).__name__, peer, reason)
