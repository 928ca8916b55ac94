"""Messages between the trainer's ranks: rank 0 (ROUTER) with the others (DEALER); see trainer/coordinator.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.messages.base import Message, Text
from inflight.types import Count, Name

PIECE_BYTES = 8 << 20
"""Of a micro-batch, in a message."""
MAX_PARCEL_BYTES = 4 << 30
"""Of a micro-batch: 64 sequences of 32,768 tokens with kept sets of 19 tokens have 0.4 GiB."""
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


Parcel = Annotated[dict[Name, TensorData], Meta(max_length=64)]
"""A micro-batch, by field of the trainer's Batch."""


class Piece(Message, tag=True):
    """A part of a micro-batch (its Parcel in msgpack, `total` bytes) from byte `offset` on, before the Learn that it is
    for, which bears the same `number`. In order and without a gap. Answered by Took."""

    number: Count
    offset: Count
    total: Annotated[int, Meta(gt=0, le=MAX_PARCEL_BYTES)]
    data: Annotated[bytes, Meta(min_length=1, max_length=PIECE_BYTES)]


class Took(Message, tag=True):
    """So many bytes of the micro-batch have come."""

    number: Count
    nbytes: Count


class Learn(Message, tag=True):
    """What to do with the micro-batch that has come in pieces. `purpose`: `learn`, forward and backward pass, answered
    by Learned; `score`, its log-probabilities alone, answered by Scored.

    `number` counts the orders to a rank from 1.
    """

    number: Count
    purpose: Annotated[str, Meta(pattern="^(learn|score)$")]


class Learned(Message, tag=True):
    """What a rank's micro-batch adds to the step's loss, and what happened, by field of the trainer's Stats."""

    number: Count
    loss: float
    stats: Annotated[dict[Name, TensorData | Counts], Meta(max_length=64)]


class Scored(Message, tag=True):
    """[B, L] log-probabilities of a rank's micro-batch under the weights as they are."""

    number: Count
    logprobs: TensorData


class Order(Message, tag=True):
    """Something that all ranks do together. Answered by Done.

    `update`: the optimizer's step. `step`: the same for the last time in a batch, and the learning rate's. `gather`:
    the parameters to publish. `checkpoint`: parameters and optimizer. `drop`: the gradient is not wanted.
    `compare`: a forward pass, of which rank 0 alone wants what it gives.
    """

    number: Count
    what: Annotated[str, Meta(pattern="^(update|step|gather|checkpoint|drop|compare)$")]


class Done(Message, tag=True):
    """A rank has done an order."""

    number: Count


class RankFailed(Message, tag=True):
    """A rank of the trainer ends, and why."""

    reason: Text


RankMessage = TrainerHello | Meet | Piece | Took | Learn | Learned | Scored | Order | Done | RankFailed
