"""Messages between the publisher (ROUTER) and every worker rank and every generator's engine (DEALER)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from inflight.messages.base import MAX_BUCKETS, Checksum, Message, Seconds, Text
from inflight.types import Count, Digest, Incarnation, Name, ParamMeta, Url, Version


class BucketMeta(Message):
    """A contiguous run of bytes that is transferred as one piece."""

    offset: Count
    nbytes: Annotated[int, Meta(gt=0)]


class Slot(Message):
    """Where one parameter lies in the send buffer."""

    meta: ParamMeta
    offset: Count


class Manifest(Message):
    """The layout of a version's bytes, which both sides must agree on; its digest names it.

    `slots` ascend by offset, aligned to `alignment` bytes; `buckets` tile `[0, total_bytes)` in order.
    `tied` maps a parameter that shares storage with another to the name of the one that is sent.
    """

    slots: Annotated[list[Slot], Meta(max_length=1 << 18)]
    tied: dict[Name, Name]
    buckets: Annotated[list[BucketMeta], Meta(max_length=MAX_BUCKETS)]
    total_bytes: Count
    alignment: Annotated[int, Meta(gt=0)]
    checksum: Annotated[str, Meta(pattern="^(crc32|sum64|none)$")]
    base: Digest | None = None
    """Of an adapter's versions: the digest of the weights that they are added to (base_digest.py)."""


class Place(Message):
    """Where a process runs and with which software, as it says itself; empty: unknown."""

    host: Annotated[str, Meta(max_length=256)]
    """Equal for processes that share memory, also that of GPUs."""
    device: Annotated[str, Meta(pattern="^(cpu|cuda)$")]
    gpus: Annotated[list[Name], Meta(max_length=64)]
    """UUIDs of the GPUs that it sees."""
    inflight: Annotated[str, Meta(max_length=64)]
    torch: Annotated[str, Meta(max_length=64)]
    vllm: Annotated[str, Meta(max_length=64)]


class RankHello(Message, tag=True):
    """A worker rank asks to join; may be repeated. It holds `version` of `publisher`; None: it has received no version.

    A version number identifies a set of weights only together with the publisher that sent it.
    """

    generator: Name
    rank: Count
    world_size: Annotated[int, Meta(gt=0)]
    version: Version | None = None
    publisher: Incarnation = ""
    incarnation: Incarnation = ""
    place: Place | None = None
    """By which the transport to it is chosen; None: it is a process of the trainer's host."""


class EngineHello(Message, tag=True):
    """A generator's engine asks to join and will get Commit messages. `url` is its HTTP address.

    It stamps `version` of `publisher`; None: it has committed no version yet.
    """

    generator: Name
    world_size: Annotated[int, Meta(gt=0)]
    url: Url
    version: Version | None = None
    publisher: Incarnation = ""
    incarnation: Incarnation = ""


class Enquire(Message, tag=True):
    """The publisher does not know (any more) what this rank or engine holds, and requests a hello."""


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
    publisher: Incarnation = ""
    """Random id of a Publisher: the versions that follow are its own."""


class Prepare(Message, tag=True):
    """Buckets of `version` are about to be sent; the rank fills its shadow with them.

    `attempt` numbers the publisher's deliveries, ascending; answers repeat it, so that each is matched to its attempt.
    `checksums` are those of the bytes in the send buffer, one per bucket; empty when the manifest has none.
    """

    version: Version
    attempt: Count
    manifest_digest: Digest
    checksums: Annotated[list[Checksum], Meta(max_length=MAX_BUCKETS)]
    publisher: Incarnation = ""


class Ready(Message, tag=True):
    """The rank holds all of `version` in its shadow, verified: `digest` is over its buckets' checksums."""

    version: Version
    attempt: Count
    digest: Digest
    receive_s: Seconds
    build_s: Seconds


class Failed(Message, tag=True):
    """The rank could not make `version` ready (or commit it); its live weights are untouched unless `poisoned`.

    An engine sends it about a commit. `attempt` is 0 when it is about no attempt alone. Phase `fit`: the engine's model
    does not fit the manifest, so no version of this publisher can ever be loaded.
    """

    version: Version
    phase: Annotated[str, Meta(pattern="^(prepare|fit|receive|verify|build|commit)$")]
    reason: Text
    poisoned: bool
    attempt: Count = 0


class Commit(Message, tag=True):
    """All ranks of this generator are ready: swap at the next step boundary. A repeated Commit only gets the answer."""

    version: Version
    attempt: Count = 0
    """That of the Prepare; the answer repeats it."""
    publisher: Incarnation = ""


class RankSwapped(Message, tag=True):
    """`version` of `publisher` is live on this rank: every later step of it computes with that version.

    Sent where nothing but the swaps of all ranks is still to be done: not for a generator's first version, and not for
    one that has the number of the version before (docs/decisions/019-ranks-report-swaps.md).
    """

    version: Version
    attempt: Count
    """That of the Prepare; numbers of another publisher may be the same."""
    publisher: Incarnation
    gap_s: Seconds
    """For how long this rank's step loop stalled."""


class Committed(Message, tag=True):
    """The engine stamps `version` from now on, and all its ranks have swapped.

    `gap_s` is the longest stall of a rank's step loop, in seconds; `running` sequences were unfinished at the swap.
    """

    version: Version
    gap_s: Seconds
    running: Count
    attempt: Count = 0
    publisher: Incarnation = ""
    """Both are those of the Commit that this answers."""


class Abort(Message, tag=True):
    """Discard the shadow of `version`; the live weights stay. Always answered, even by a rank that has no attempt."""

    version: Version
    attempt: Count
    reason: Text


class Aborted(Message, tag=True):
    """The rank holds nothing of this attempt and will not begin it: neither transport nor shadow is in use."""

    version: Version
    attempt: Count
