"""Messages between the trainer's ranks: rank 0 (ROUTER) with the others (DEALER); see trainer/coordinator.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.messages.base import Message, Text
from inflight.types import Count, Name

PIECE_BYTES = 8 << 20
"""Most bytes of a micro-batch in one message."""
MAX_PARCEL_BYTES = 4 << 30
"""Most bytes of a micro-batch: 64 sequences of 32,768 tokens with 19 recorded alternatives each have 0.4 GiB."""
Counts = Annotated[dict[Name, int], Meta(max_length=1024)]


class TrainerHello(Message, tag=True):
    """A rank of the trainer has started and waits for Meet."""

    rank: Annotated[int, Meta(ge=1)]


class Meet(Message, tag=True):
    """All ranks of the trainer have started: they form the process group at `rendezvous`."""

    rendezvous: Text


class TensorData(msgspec.Struct, frozen=True, array_like=True):
    """A tensor by value; for small ones only, weights are never sent as messages."""

    dtype: Annotated[str, Meta(pattern="^(bool|int32|int64|float32|float64)$")]
    shape: Annotated[list[Count], Meta(max_length=8)]
    data: bytes


Parcel = Annotated[dict[Name, TensorData], Meta(max_length=64)]
"""A micro-batch: name of a field of the trainer's Batch → tensor."""


class Piece(Message, tag=True):
    """A part of a micro-batch (its Parcel in msgpack, `total` bytes) from byte `offset` on. Pieces are sent in order
    and without a gap, before the Learn message with the same `number`. Answered by Took."""

    number: Count
    offset: Count
    total: Annotated[int, Meta(gt=0, le=MAX_PARCEL_BYTES)]
    data: Annotated[bytes, Meta(min_length=1, max_length=PIECE_BYTES)]


class Took(Message, tag=True):
    """`nbytes` bytes of the micro-batch have arrived."""

    number: Count
    nbytes: Count


class Learn(Message, tag=True):
    """What to do with the micro-batch that was sent in pieces. `purpose`: `learn`, a forward and backward pass,
    answered by Learned; `score`, its log-probabilities alone, answered by Scored.

    `number` counts the orders to a rank from 1.
    """

    number: Count
    purpose: Annotated[str, Meta(pattern="^(learn|score)$")]


class Learned(Message, tag=True):
    """What a rank's micro-batch adds to the step's loss, and its figures, by field of the trainer's Stats."""

    number: Count
    loss: float
    stats: Annotated[dict[Name, TensorData | Counts], Meta(max_length=64)]


class Scored(Message, tag=True):
    """[B, L] log-probabilities of a rank's micro-batch under the current weights."""

    number: Count
    logprobs: TensorData


class Order(Message, tag=True):
    """An operation that all ranks carry out together. Answered by Done.

    `update`: an optimizer step. `step`: the same for the last time in a batch, plus the learning-rate schedule.
    `gather`: the parameters to publish. `checkpoint`: parameters and optimizer. `drop`: the gradient is discarded.
    `compare`: a forward pass whose result only rank 0 uses.
    """

    number: Count
    what: Annotated[str, Meta(pattern="^(update|step|gather|checkpoint|drop|compare)$")]


class Done(Message, tag=True):
    """A rank has carried out an order."""

    number: Count


class RankFailed(Message, tag=True):
    """A rank of the trainer ends, with the reason."""

    reason: Text


RankMessage = TrainerHello | Meet | Piece | Took | Learn | Learned | Scored | Order | Done | RankFailed
