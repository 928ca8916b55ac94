"""The objects that all replicas of one publisher share."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from inflight.config import PublishConfig
from inflight.messages import Manifest, Place, Welcome
from inflight.weights import plan
from inflight.weights.publish.channel import Channel, ChannelSource
from inflight.weights.publish.events import EventLog
from inflight.weights.publish.outbox import Outbox
from inflight.weights.transport.choice import TransportChoice

log = logging.getLogger(__name__)


@dataclass
class Session:
    """One publisher: its identity, the manifest and configuration, and the log of outcomes."""

    config: PublishConfig
    manifest: Manifest
    outbox: Outbox
    channels: ChannelSource
    choice: TransportChoice
    clock: Callable[[], float] = time.monotonic
    """Seconds; only differences matter."""
    events: EventLog = field(default_factory=EventLog)
    elastic: bool = False
    """Generators may join at any time: what one misses before it has joined for the first time is no failure."""
    publisher: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this publisher's versions from those that another one sent under the same numbers."""
    attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of the attempts, over all generators."""
    manifest_digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.manifest_digest = plan.digest(self.manifest)

    def connect(self, generator: str, places: Mapping[str, Place | None]) -> Channel:
        """A channel to a generator, and a Welcome to it for each of its ranks; the publisher is the transport's rank 0.
        `places`: its ranks in order, and where each is.

        Raises TransportError when the transport can't be opened.
        """
        kind = self.choice.of(list(places.values()))
        ranks = list(places)
        channel = self.channels.open(generator, len(ranks), kind)
        log.info("weights go to %s over %s", generator, kind)
        for number, rank in enumerate(ranks, start=1):
            welcome = Welcome(
                manifest=self.manifest,
                manifest_digest=self.manifest_digest,
                transport=kind,
                rendezvous=channel.rendezvous,
                transport_rank=number,
                transport_size=len(ranks) + 1,
                timeout_s=self.config.transfer_timeout_s,
                publisher=self.publisher,
            )
            self.outbox.send([rank], welcome)
        return channel
