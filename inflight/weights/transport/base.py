"""The seam between what is sent and how: every transport is a Sender on the trainer and a Receiver on each rank.

Both sides know the manifest. A transport moves whole buckets in the manifest's order, never interprets them, bounds
every wait by the timeout it was made with, and raises TransportError naming the phase and, where known, the rank that
did not answer. After an error the object is dead; a new one must be made.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from inflight.messages import BucketMeta


class TransportError(RuntimeError):
    """A transfer that failed or timed out; names the phase and the peer that did not answer."""


def first_line(error: Exception) -> str:
    """What happened, without what libraries print beneath it."""
    return (str(error) or type(error).__name__).splitlines()[0]


def from_trainer() -> Any:
    """torch's options of a broadcast from rank 0 that does not wait."""
    how = dist.BroadcastOptions()
    how.rootRank = 0
    how.rootTensor = 0
    how.asyncOp = True
    return how


class Sender(Protocol):
    """Trainer side. Making one never waits for a receiver; the first `send` does."""

    @property
    def rendezvous(self) -> str:
        """What a Welcome tells the receivers, so that they find this sender."""

    def send(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Sends `buffer[b.offset : b.offset + b.nbytes]` of each bucket to all; returns when it may be reused.

        `buffer` is uint8 `[total_bytes]` on the transport's device.
        """

    def close(self) -> None:
        """Frees sockets and memory; never waits for a peer. From any thread, also while a transfer runs: it ends with a
        TransportError, at once or, where that can't be done, within the timeout."""


class Receiver(Protocol):
    """Rank side. A rank that can't take part in a transfer closes its receiver, which ends the transfer for all."""

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """Fills uint8 `buffer` `[total_bytes]` bucket by bucket; returns when all bytes are there."""

    def close(self) -> None:
        """Frees sockets and memory; never waits for a peer. From any thread, also while a transfer runs: it ends with a
        TransportError, at once or, where that can't be done, within the timeout. Raises TransportError itself when the
        device may still write to where bytes land: they are not to be received there again."""
