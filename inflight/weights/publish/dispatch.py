"""The threads beneath the conversation with the generators.

Every generator has a transport and a sending thread of its own, so one that is late, fails or dies holds up no other.
One lock guards all deliveries; messages are queued while it is held, so each peer sees them in the order of the states.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

import torch

from inflight.bus import Listener, Lost, Received
from inflight.config import PublishConfig
from inflight.messages import Finish, Manifest
from inflight.weights.publish.channel import Channel
from inflight.weights.publish.conversation import Conversation, Offer
from inflight.weights.publish.delivery import Delivery, State
from inflight.weights.publish.finite import NotFinite
from inflight.weights.publish.roster import Roster
from inflight.weights.publish.routes import RoutesFile, routes
from inflight.weights.transport import make_sender
from inflight.weights.transport.base import Sender, TransportError
from inflight.weights.transport.sums import BufferSums

log = logging.getLogger(__name__)

POLL_S = 0.05
"""How late a deadline may be noticed; messages are handled at once."""
HEARD_AT_ONCE = 100
"""Messages between two looks at the deadlines."""
CLOSE_S = 5.0


class Dispatch:
    """Hears the listener, runs the conversation and its transfers.

    `roster` and `conversation` may be used under `changed`, which is notified whenever anything happened.
    """

    def __init__(
        self,
        listener: Listener,
        config: PublishConfig,
        kind: str,
        manifest: Manifest,
        buffer: torch.Tensor,
        *,
        version: int,
        inspect: Callable[[], list[int]],
        ranks: dict[str, int],
        routes_file: RoutesFile | None = None,
    ) -> None:
        """`version` is what lies in `buffer`; `inspect` looks at it before any of it is sent."""
        self.error: BaseException | None = None
        """What ended publishing; nothing is delivered any more."""
        self.changed = threading.Condition(threading.RLock())
        clock, self._sums = time.monotonic, BufferSums()
        sender = functools.partial(make_sender, sums=self._sums)
        self.roster = Roster(listener, config, kind, manifest, ranks, self._open_channel, sender, clock)
        self.conversation = Conversation(self.roster, config, self._submit, clock, self.offer(version, inspect))
        self._listener, self._config, self._routes_file = listener, config, routes_file
        self._manifest, self._buffer = manifest, buffer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, version: int, inspect: Callable[[], list[int]]) -> Offer:
        """What lies in the send buffer; `inspect` looks at it before any of it is sent."""
        return Offer(version, _Once(lambda: self._inspected(inspect)))

    def release(self, version: int, inspect: Callable[[], list[int]]) -> Offer:
        """Takes what lies in the send buffer to the generators."""
        offer = self.offer(version, inspect)
        with self.changed:
            self.conversation.release(offer)
        return offer

    def _inspected(self, inspect: Callable[[], list[int]]) -> list[int]:
        sums = inspect()  # waits until all is packed: only from here on is it this version's bytes that are summed
        self._sums.forget()
        return sums

    def finish(self, reason: str) -> None:
        """Tells the engines that the run is over."""
        with self.changed:
            engines = [delivery.engine for delivery in self.roster.deliveries.values()]
            self.roster.tell(engines, Finish(reason=reason))

    def close(self) -> None:
        """Aborts what is not being committed yet and ends all threads; waits for none longer than CLOSE_S, and up to
        2 s for each NCCL communicator that is not ended at once."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_S)
        with self.changed:
            for delivery in self.roster.deliveries.values():
                if delivery.state is State.SENDING:
                    self.roster.tell_abort(delivery, delivery.ranks, "the publisher closes")
                self.roster.drop_channel(delivery)
        deadline = time.monotonic() + CLOSE_S
        stuck = [c for c in self.roster.left_behind if not c.join(max(0.0, deadline - time.monotonic()))]
        if stuck:
            log.warning("%d transfers are still stuck in the transport", len(stuck))

    # --- sending: the channels' threads ------------------------------------------------------------------------------

    def _open_channel(self, generator: str, sender: Sender) -> Channel:
        return Channel(generator, sender, self._channel_failed)

    def _submit(self, delivery: Delivery, offer: Offer) -> None:
        channel = delivery.channel
        assert channel is not None
        channel.submit(functools.partial(self._send, delivery, channel, delivery.attempt, offer))

    def _send(self, delivery: Delivery, channel: Channel, attempt: int, offer: Offer, sender: Sender) -> None:
        try:
            sums = offer.sums()
        except NotFinite as error:
            with self.changed:
                self.error = self.error or error
                self.conversation.refuse(offer, str(error))
                self.changed.notify_all()
            return
        with self.changed:
            if not self.conversation.prepare(delivery, channel, attempt, sums):
                return
        sender.send(self._buffer, self._manifest.buckets)

    def _channel_failed(self, channel: Channel, error: TransportError) -> None:
        with self.changed:
            self.conversation.channel_failed(channel, str(error))
            self.changed.notify_all()

    # --- hearing: the dispatch's thread ------------------------------------------------------------------------------

    def _hear(self, got: Received | Lost | None) -> None:
        """Also what came meanwhile: who has answered in time is not late because this thread was busy."""
        heard = 0
        while got is not None:
            match got:
                case Lost(peer=peer, asked=asked):
                    self.conversation.lost(peer, asked=asked)
                case Received(peer=peer, message=message):
                    self.conversation.hear(peer, message)
            heard += 1
            got = self._listener.receive(0) if heard < HEARD_AT_ONCE else None

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                got = self._listener.receive(POLL_S)
                with self.changed:
                    self._hear(got)
                    self.conversation.expire()
                    wanted = routes(self.conversation.version, self.roster.deliveries.values(), self._config.max_behind)
                    if self._routes_file is not None:  # before anyone sees what changed: he may look into the file
                        self._routes_file.write(wanted)
                    self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - kept, and raised to the trainer by whatever it waits in
            with self.changed:
                self.error = error
                self.changed.notify_all()


class _Once:
    """A value that several threads want and the first of them computes. What computing raises, all get."""

    def __init__(self, compute: Callable[[], list[int]]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._value: list[int] | None = None
        self._error: Exception | None = None

    def __call__(self) -> list[int]:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._value is None:
                try:
                    self._value = self._compute()
                except Exception as error:
                    self._error = error
                    raise
            return self._value
