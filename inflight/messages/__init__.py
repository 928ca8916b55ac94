"""Every message between processes: typed, tagged, msgpack, with a schema number and a bounded size.

A frame is one byte of schema number followed by the msgpack body. Decoding refuses another schema, an unknown
message, unknown or missing fields, wrong types and frames over the limit, with a `WireError` that says which.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.messages.base import MAX_BUCKETS, Checksum, Message, Seconds, Text
from inflight.messages.ranks import RankMessage
from inflight.messages.rollouts import ActorBye as ActorBye
from inflight.messages.rollouts import ActorHello as ActorHello
from inflight.messages.rollouts import Grant as Grant
from inflight.messages.rollouts import GroupAck as GroupAck
from inflight.messages.rollouts import GroupDone as GroupDone
from inflight.messages.rollouts import GroupFailed as GroupFailed
from inflight.types import Count, Digest, Incarnation, Name, ParamMeta, Url, Version

SCHEMA = 4
MAX_FRAME_BYTES = 64 << 20
"""A rollout group of 4,096 samples of 1,000 tokens fits; weights never travel here."""


class WireError(ValueError):
    """A received frame that is not a valid message of this schema."""


# --- any endpoint -------------------------------------------------------------------------------------------------


class Heartbeat(Message, tag=True):
    """Sent by both sides at the bus's interval; carries nothing, proves that the peer lives."""


class Goodbye(Message, tag=True):
    """The peer has closed its end: nothing more comes from it, and what is sent to it is lost."""


class Refused(Message, tag=True):
    """The peer is not accepted; the receiver ends with this reason."""

    reason: Text


class Finish(Message, tag=True):
    """The run is over: no more groups are wanted."""

    reason: Text


# --- weights: publisher (ROUTER) with every worker rank and every generator's engine (DEALER) ---------------------


class BucketMeta(Message):
    """A contiguous run of bytes that travels as one piece."""

    offset: Count
    nbytes: Annotated[int, Meta(gt=0)]


class Slot(Message):
    """Where one parameter lies in the send buffer."""

    meta: ParamMeta
    offset: Count


class Manifest(Message):
    """All that both sides must agree on about the bytes of a version; its digest names it.

    `slots` ascend by offset, aligned to `alignment` bytes; `buckets` tile `[0, total_bytes)` in order.
    `tied` maps a parameter that shares storage with another to the name that travels.
    """

    slots: Annotated[list[Slot], Meta(max_length=1 << 18)]
    tied: dict[Name, Name]
    buckets: Annotated[list[BucketMeta], Meta(max_length=MAX_BUCKETS)]
    total_bytes: Count
    alignment: Annotated[int, Meta(gt=0)]
    checksum: Annotated[str, Meta(pattern="^(crc32|sum64|none)$")]


class RankHello(Message, tag=True):
    """A worker rank asks to take part; `version` is what it holds now. Repeating it does no harm."""

    generator: Name
    rank: Count
    world_size: Annotated[int, Meta(gt=0)]
    version: Version
    incarnation: Incarnation = ""


class EngineHello(Message, tag=True):
    """A generator's engine asks to take part: it will be told when to commit. `url` is where it serves."""

    generator: Name
    world_size: Annotated[int, Meta(gt=0)]
    version: Version
    url: Url
    incarnation: Incarnation = ""


class Enquire(Message, tag=True):
    """The publisher does not know (any more) what this rank or engine holds: it is to say hello."""


class Welcome(Message, tag=True):
    """The publisher accepts a rank: the manifest and the transport's rendezvous.

    `transport_rank` is this member's rank on the communicator (the publisher is 0) of `transport_size` members.
    """

    manifest: Manifest
    manifest_digest: Digest
    transport: Annotated[str, Meta(pattern="^(gloo|nccl|ipc)$")]
    rendezvous: Text
    transport_rank: Annotated[int, Meta(ge=1)]
    transport_size: Annotated[int, Meta(ge=2)]
    timeout_s: Seconds


class Prepare(Message, tag=True):
    """Buckets of `version` are about to stream; the rank fills its shadow with them.

    `attempt` numbers the publisher's deliveries, upwards; answers repeat it, so that none is taken for another's.
    `checksums` are those of the bytes as they lie in the send buffer, one a bucket; empty when the manifest has none.
    """

    version: Version
    attempt: Count
    manifest_digest: Digest
    checksums: Annotated[list[Checksum], Meta(max_length=MAX_BUCKETS)]


class Ready(Message, tag=True):
    """The rank holds all of `version` in its shadow, verified: `digest` is over its buckets' checksums."""

    version: Version
    attempt: Count
    digest: Digest
    receive_s: Seconds
    build_s: Seconds


class Failed(Message, tag=True):
    """The rank could not get `version` ready (or committed); its live weights are untouched unless `poisoned`.

    An engine says it of a commit, with no attempt.
    """

    version: Version
    phase: Annotated[str, Meta(pattern="^(prepare|receive|verify|build|commit)$")]
    reason: Text
    poisoned: bool
    attempt: Count = 0


class Commit(Message, tag=True):
    """All ranks of this generator are ready: swap at the next step boundary. A repeat is answered and does nothing."""

    version: Version


class Committed(Message, tag=True):
    """The engine stamps `version` from now on.

    `gap_s` is the longest time that a rank's step loop stood still; `running` sequences were unfinished at the swap.
    """

    version: Version
    gap_s: Seconds
    running: Count


class Abort(Message, tag=True):
    """Discard the shadow of `version`; the live weights stay. Always answered, also by a rank that knows of nothing."""

    version: Version
    attempt: Count
    reason: Text


class Aborted(Message, tag=True):
    """The rank holds nothing of this attempt and will not begin it: neither transport nor shadow is in use."""

    version: Version
    attempt: Count


# --- status: every process (DEALER) to the launcher (ROUTER) ------------------------------------------------------


class Status(Message, tag=True):
    """A snapshot for the progress view: metric name to value."""

    source: Name
    values: Annotated[dict[Name, float | int | str], Meta(max_length=256)]


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
    | Committed
    | Abort
    | Aborted
    | ActorHello
    | Grant
    | GroupDone
    | GroupFailed
    | GroupAck
    | ActorBye
    | Finish
    | Status
    | RankMessage
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One frame. Raises WireError when the message is larger than MAX_FRAME_BYTES."""
    frame = bytes([SCHEMA]) + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> AnyMessage:
    """The message of one frame. Raises WireError on anything that is not exactly one valid message."""
    if not 2 <= len(frame) <= MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, allowed are 2 to {MAX_FRAME_BYTES}")
    if frame[0] != SCHEMA:
        raise WireError(f"frame of schema {frame[0]}, this side speaks {SCHEMA}")
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None
