"""The interface of transports: every transport is a Sender on the trainer and a Receiver on each rank.

Both sides know the manifest. A transport sends whole buckets in the manifest's order, or lets each rank pull its own
parts of them (ipc). It never interprets bytes, bounds every wait by its timeout, and raises TransportError that names
the phase and, if known, the rank that did not answer.
After an error the object can't be used any more; a new one must be made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from inflight.messages import BucketMeta


class TransportError(RuntimeError):
    """A transfer failed or timed out; the text names the phase and the peer that did not answer."""


def from_trainer() -> Any:
    """torch's options of an asynchronous broadcast from rank 0."""
    how = dist.BroadcastOptions()
    how.rootRank = 0
    how.rootTensor = 0
    how.asyncOp = True
    return how


class Sender(Protocol):
    """Trainer side. Making one never waits for a receiver; the first `send` does."""

    follows: bool
    """Whether `send` may begin while the buffer is being packed."""

    @property
    def rendezvous(self) -> str:
        """The address in a Welcome, by which the receivers find this sender."""

    def send(self, buffer: torch.Tensor, buckets: list[BucketMeta], packed: Iterable[int] = ()) -> None:
        """Sends `buffer[b.offset : b.offset + b.nbytes]` of each bucket to all; returns when it may be reused.

        `buffer` is uint8 `[total_bytes]` on the transport's device. It is complete, unless the sender follows: then
        `packed` tells, as soon as that grows, how many of its first bytes are, and ends with all; none: it is complete.
        """

    def close(self) -> None:
        """Frees sockets and memory; never waits for a peer. May be called from any thread, also during a transfer,
        which then ends with a TransportError, at once or, if that is impossible, within the timeout."""


class Receiver(Protocol):
    """Rank side. A rank that can't take part in a transfer closes its receiver, which ends the transfer for all."""

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Fills uint8 `buffer` `[total_bytes]` bucket by bucket; returns when all bytes are there."""

    def close(self) -> None:
        """Frees sockets and memory; never waits for a peer. May be called from any thread, also during a transfer,
        which then ends with a TransportError, at once or, if that is impossible, within the timeout. Raises
        TransportError itself when the device may still write to the target memory, which then must not be filled
        again."""
