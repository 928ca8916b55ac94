"""All messages between processes: typed, tagged, in msgpack, with a schema number and a bounded size.

A frame is one byte with the schema number followed by the msgpack body. Decoding refuses another schema, an unknown
message, unknown or missing fields, wrong types and frames over the limit, with a `WireError` that says which.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.arrays import from_msgpack, to_msgpack
from inflight.messages.base import Message, Seconds, Text
from inflight.messages.evaluation import Evaluate as Evaluate
from inflight.messages.evaluation import Evaluated as Evaluated
from inflight.messages.evaluation import EvaluatorHello as EvaluatorHello
from inflight.messages.evaluation import StopEvaluating as StopEvaluating
from inflight.messages.hosts import Join as Join
from inflight.messages.hosts import Placed as Placed
from inflight.messages.hosts import Vacated as Vacated
from inflight.messages.ranks import RankMessage
from inflight.messages.rollouts import ActorBye as ActorBye
from inflight.messages.rollouts import ActorHello as ActorHello
from inflight.messages.rollouts import Grant as Grant
from inflight.messages.rollouts import GroupAck as GroupAck
from inflight.messages.rollouts import GroupDone as GroupDone
from inflight.messages.rollouts import GroupFailed as GroupFailed
from inflight.messages.rollouts import Routed as Routed
from inflight.messages.rollouts import RoutesWanted as RoutesWanted
from inflight.messages.weights import Abort as Abort
from inflight.messages.weights import Aborted as Aborted
from inflight.messages.weights import BucketMeta as BucketMeta
from inflight.messages.weights import Commit as Commit
from inflight.messages.weights import Committed as Committed
from inflight.messages.weights import EngineHello as EngineHello
from inflight.messages.weights import Enquire as Enquire
from inflight.messages.weights import Failed as Failed
from inflight.messages.weights import Manifest as Manifest
from inflight.messages.weights import Place as Place
from inflight.messages.weights import Prepare as Prepare
from inflight.messages.weights import RankHello as RankHello
from inflight.messages.weights import RankSwapped as RankSwapped
from inflight.messages.weights import Ready as Ready
from inflight.messages.weights import Slot as Slot
from inflight.messages.weights import Welcome as Welcome
from inflight.types import Name, Value

SCHEMA = 12
MAX_FRAME_BYTES = 64 << 20
"""Large enough for a rollout group of 4,096 samples of 1,000 tokens; weights are never sent as messages."""


class WireError(ValueError):
    """A received frame that is not a valid message of this schema."""


# --- any endpoint -------------------------------------------------------------------------------------------------


class ClockOffset(msgspec.Struct, frozen=True, array_like=True):
    """By how many seconds the clock of a listener's host is ahead of that of the process that has asked for its time,
    give or take half of the round trip (bus/round_trips.py)."""

    ahead_s: float
    round_trip_s: Seconds


class Heartbeat(Message, tag=True):
    """Proves that the peer lives: sent by a link at the bus's interval, and answered at once by its listener."""

    sent: float = 0.0
    """Unix time of its sender; 0: it does not say."""
    answers: float = 0.0
    """`sent` of the heartbeat that this one answers; 0: it answers none."""
    offset: ClockOffset | None = None
    """What the link has found from earlier answers."""
    listener: Annotated[str, Meta(max_length=32)] = ""
    """Which listener answers: another one after a restart, also at the same address; empty: it is no answer."""


class Goodbye(Message, tag=True):
    """The peer has closed its side: it sends nothing more, and what is sent to it is discarded."""

    asked: bool = False
    """It was asked to end (SIGTERM): work that it leaves unfinished is no failure."""


class Refused(Message, tag=True):
    """The peer is not accepted; the receiver ends with this reason."""

    reason: Text


class Finish(Message, tag=True):
    """The run is over: no more groups are needed."""

    reason: Text


# --- status: every process (DEALER) to the launcher (ROUTER) ------------------------------------------------------


class Status(Message, tag=True):
    """A snapshot for the progress view: name of a figure → value."""

    source: Name
    values: Annotated[dict[Name, Value], Meta(max_length=4096)]


AnyMessage = (
    Heartbeat
    | Goodbye
    | Refused
    | RankHello
    | EngineHello
    | Enquire
    | Welcome
    | Prepare
    | Ready
    | Failed
    | Commit
    | RankSwapped
    | Committed
    | Abort
    | Aborted
    | ActorHello
    | RoutesWanted
    | Routed
    | Grant
    | GroupDone
    | GroupFailed
    | GroupAck
    | ActorBye
    | EvaluatorHello
    | Evaluate
    | StopEvaluating
    | Evaluated
    | Finish
    | Status
    | Join
    | Placed
    | Vacated
    | RankMessage
)

_encoder = msgspec.msgpack.Encoder(enc_hook=to_msgpack)
_decoder = msgspec.msgpack.Decoder(AnyMessage, dec_hook=from_msgpack)


def encode(message: AnyMessage) -> bytes:
    """Encodes one frame. Raises WireError when the message is larger than MAX_FRAME_BYTES."""
    frame = bytes([SCHEMA]) + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> AnyMessage:
    """Decodes one frame. Raises WireError for anything but exactly one valid message."""
    if not 2 <= len(frame) <= MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, allowed are 2 to {MAX_FRAME_BYTES}")
    if frame[0] != SCHEMA:
        raise WireError(f"frame of schema {frame[0]}, this side has schema {SCHEMA}")
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None
