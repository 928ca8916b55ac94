"""The sending thread of one generator, so that a transfer does not block messages of other generators' ranks."""

from __future__ import annotations

import queue
import threading
import time
from typing import Protocol

from inflight.config.network import NetworkConfig
from inflight.error_line import with_kind
from inflight.weights.publish.offer import Offer
from inflight.weights.transport import make_sender
from inflight.weights.transport.base import Sender, TransportError
from inflight.weights.transport.sums import BufferSums


class Announced(Protocol):
    """What a channel sends: an Attempt."""

    offer: Offer

    def announce(self, *, follow: bool) -> bool:
        """Announces the offer's bytes to the ranks: with `follow`, for senders that follow the packing, as soon as its
        first part is packed. False: they must not be sent."""


class Channel:
    """Owns a Sender and the one thread that uses it. Attempts run in order; the first that fails ends the channel.

    A channel that is closed while it sends is abandoned: its thread ends with the transfer, within the transport's
    timeout, and until then only reads the send buffer.
    """

    def __init__(self, name: str, sender: Sender) -> None:
        self.rendezvous = sender.rendezvous
        self.error: TransportError | None = None
        """Why the channel ended by itself; polled by the publisher's loop."""
        self._sender = sender
        self._attempts: queue.Queue[Announced | None] = queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"channel {name}", daemon=True)
        self._thread.start()

    def submit(self, attempt: Announced) -> None:
        """Queues an attempt; on a closed channel it is never sent."""
        self._attempts.put(attempt)

    def close(self) -> None:
        """Frees the sender as soon as no transfer uses it. Does not wait, except for NCCL up to its timeout."""
        self._closed.set()
        self._attempts.put(None)
        self._sender.close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread of a closed channel. False when a transfer still holds it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (attempt := self._attempts.get()) is not None and not self._closed.is_set():
            try:
                if attempt.announce(follow=self._sender.follows):
                    offer = attempt.offer
                    self._sender.send(offer.buffer, offer.manifest.buckets, offer.packed)
            except Exception as error:  # noqa: BLE001 - any error of a transport ends this channel, not the trainer
                if not isinstance(error, TransportError):
                    error = TransportError(f"send: {with_kind(error)}")
                if not self._closed.is_set():
                    self.error = error
                break
        self._sender.close()


class ChannelSource:
    """Opens a channel for each generator, and tracks closed ones that are still in a transfer."""

    def __init__(self, timeout_s: float, network: NetworkConfig) -> None:
        """`timeout_s` bounds each wait of a transfer; ranks find their senders on `network`."""
        self._timeout_s = timeout_s
        self._network = network
        self.buffer_sums = BufferSums()
        """Checksums of the send buffer that all channels read."""
        self._abandoned: list[Channel] = []

    def open(self, generator: str, world_size: int, kind: str) -> Channel:
        """A channel to the ranks of a generator over gloo, nccl or ipc. Raises TransportError when its transport can't
        be opened."""
        return Channel(generator, self.make_sender(generator, world_size, kind))

    def make_sender(self, generator: str, world_size: int, kind: str) -> Sender:
        """The transport beneath; the publisher is its rank 0."""
        return make_sender(kind, world_size + 1, self._timeout_s, self.buffer_sums, self._network)

    def close(self, channel: Channel) -> None:
        """Closes a channel."""
        channel.close()
        self._abandoned = [each for each in self._abandoned if not each.join(0)] + [channel]

    def join(self, timeout_s: float) -> int:
        """Waits for the threads of closed channels; returns how many are still in a transfer after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        return sum(not each.join(max(0.0, deadline - time.monotonic())) for each in self._abandoned)
