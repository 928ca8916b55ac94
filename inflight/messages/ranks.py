"""Messages between the trainer's ranks: rank 0 (ROUTER) with the others (DEALER); see trainer/team.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.messages.base import Message, Text
from inflight.types import Count, Name

Counts = Annotated[dict[Name, int], Meta(max_length=1024)]


class TrainerHello(Message, tag=True):
    """A rank of the trainer is there and waits to be told where all meet."""

    rank: Annotated[int, Meta(ge=1)]


class Meet(Message, tag=True):
    """All ranks of the trainer are there: form the process group at `rendezvous`."""

    rendezvous: Text


class TensorData(msgspec.Struct, frozen=True, array_like=True):
    """A tensor by value: small ones alone, weights never travel here."""

    dtype: Annotated[str, Meta(pattern="^(bool|int32|int64|float32|float64)$")]
    shape: Annotated[list[Count], Meta(max_length=8)]
    data: bytes


class Learn(Message, tag=True):
    """Forward and backward pass of a micro-batch, by field of the trainer's Batch. Answered by Learned.

    `number` counts the orders to a rank from 1.
    """

    number: Count
    batch: Annotated[dict[Name, TensorData], Meta(max_length=64)]


class Learned(Message, tag=True):
    """What a rank's micro-batch adds to the step's loss, and what happened, by field of the trainer's Stats."""

    number: Count
    loss: float
    stats: Annotated[dict[Name, TensorData | Counts], Meta(max_length=64)]


class Order(Message, tag=True):
    """Something that all ranks do together. Answered by Done.

    `step`: the optimizer's. `gather`: the parameters to publish. `checkpoint`: parameters and optimizer. `drop`: the
    gradient is not wanted.
    """

    number: Count
    what: Annotated[str, Meta(pattern="^(step|gather|checkpoint|drop)$")]


class Done(Message, tag=True):
    """A rank has done an order."""

    number: Count


class RankFailed(Message, tag=True):
    """A rank of the trainer ends, and why."""

    reason: Text
