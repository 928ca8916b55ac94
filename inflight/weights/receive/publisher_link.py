"""What a worker rank says to its publisher and hears from it."""

from __future__ import annotations

import collections
import logging

import msgspec

from inflight.bus import BusError, Link
from inflight.messages import Abort, AnyMessage, Prepare, RankHello

log = logging.getLogger(__name__)


class PublisherLink:
    """A rank's connection to the process that publishes, with the messages that came while it was busy."""

    def __init__(self, link: Link, greeting: RankHello) -> None:
        """Owns `link` and closes it."""
        self.link = link
        self.name = f"{greeting.generator}.r{greeting.rank}"
        self._greeting = greeting
        self._pending: collections.deque[AnyMessage] = collections.deque()

    def hello(self, version: int | None, publisher: str) -> None:
        """Names this rank and its live version."""
        self.tell(msgspec.structs.replace(self._greeting, version=version, publisher=publisher))

    def tell(self, message: AnyMessage) -> None:
        """Sends a message; the publisher notices a link that is closed or lost."""
        try:
            self.link.send(message)
        except BusError as error:
            log.warning("%s: %s not sent: %s", self.name, type(message).__name__, error)

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """The next message in order, or None when nothing came within `timeout_s`. Raises PeerLost."""
        return self._pending.popleft() if self._pending else self.link.receive(timeout_s)

    def was_aborted(self, prepare: Prepare) -> bool:
        """Whether its Abort has arrived meanwhile. All messages that have arrived are kept, in order."""
        while (message := self.link.receive(0)) is not None:
            self._pending.append(message)
        return any(isinstance(message, Abort) and message.attempt >= prepare.attempt for message in self._pending)

    def close(self) -> None:
        """Closes the link: the publisher notices the loss of this rank. A second call does nothing."""
        self.link.close()
