"""Records that all parts of inflight share: versions, spans, metadata of weights, and rollouts.

Nothing here imports torch, zmq or vllm. Records are `msgspec.Struct`s, so the wire (messages/) and the files of a
run (rollouts.msgpack) hold them unchanged, and decoding validates every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from inflight.arrays import Floats, Sets, Tokens, convert

Version = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Grows by one with each published optimizer step; 0 is the checkpoint that a run starts from."""

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Digest = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]
"""SHA-256, hexadecimal."""
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Small enough for all representations: JSON readers, msgpack, tensors of int64."""
Incarnation = Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")]
"""Random, and shared by all processes of one start of a generator: distinguishes a restarted generator from one that
was disconnected for a while. Empty for one that is never restarted (benches)."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, by the dtype names that may go over the wire."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: immutable, keyword-only, unknown fields refused when decoded."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """A run of generated tokens sampled under one version: from index `start` to the next span's start.

    Example: `[VersionSpan(0, 3), VersionSpan(17, 4)]`: tokens 0..16 were sampled by version 3, the rest by 4.
    """

    start: Count
    version: Version


class PrefillSpan(msgspec.Struct, frozen=True, array_like=True):
    """KV written by prefill rather than decoding.

    Before output token `output_index` was sampled, the KV from sequence position `position` on was (re)computed
    under `version`. An undisturbed request has `[PrefillSpan(0, 0, v)]`; chunked prefill over a swap and resumption
    after preemption add one each. A version of -1 is unknown: KV from another version's prefix cache (when sharing is
    configured) or from an external cache.
    """

    output_index: Count
    position: Count
    version: Annotated[int, Meta(ge=-1)]


class ParamMeta(Record):
    """One parameter as it is sent: its checkpoint (transformers) name, full shape and wire dtype."""

    name: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    dtype: Annotated[str, Meta(pattern="^(float32|bfloat16|float16)$")]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without padding."""
        return self.numel * DTYPE_BYTES[self.dtype]


class RoutedExperts(Record):
    """The experts to which a mixture-of-experts model sent each token of a sequence, as recorded by the engine.

    `data` holds `shape` = [tokens of prompt and completion that the engine has run; layers; experts per token] unsigned
    integers of `bytes_each` bytes, little endian, in row order.
    """

    shape: tuple[Count, Count, Count]
    bytes_each: Annotated[int, Meta(ge=1, le=2)]
    data: Annotated[bytes, Meta(max_length=1 << 28)]

    def __post_init__(self) -> None:
        tokens, layers, each = self.shape
        if tokens * layers * each * self.bytes_each != len(self.data):
            raise ValueError(f"{len(self.data)} bytes are not {self.shape} integers of {self.bytes_each} bytes")


class Turn(Record, omit_defaults=True):
    """One sampled completion of a prompt: tokens, and the engine's data on them when it sampled them."""

    token_ids: Tokens
    """[T]"""
    logprobs: Floats
    """[T] log-probability of each token under the processed distribution it was sampled from."""
    token_versions: Annotated[list[VersionSpan], Meta(max_length=1 << 16)]
    prefill_versions: Annotated[list[PrefillSpan], Meta(max_length=1 << 16)]
    finish_reason: Annotated[str, Meta(max_length=64)]
    kept: Sets | None = None
    """[T] the tokens that top-k and top-p left to sample each token from; an empty set was not recorded."""
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        convert(self, token_ids=Tokens, logprobs=Floats, kept=Sets)


class StepReward(msgspec.Struct, frozen=True, array_like=True):
    """A process reward: the reward of the step that ends with completion token `index`."""

    index: Count
    reward: float


class GeneratorSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one generator made: from index `start` to the next piece's start."""

    start: Count
    generator: Name


class Rollout(Record, omit_defaults=True):
    """A finished, scored sample: everything the gate, the loss and the audit need."""

    rollout_id: Name
    group_id: Name
    prompt_ids: Tokens
    """[P]"""
    turn: Turn
    reward: float
    generator: Name
    started: float
    """Wall-clock seconds (Unix) at submission."""
    finished: float
    first_token_s: Annotated[float, Meta(ge=0)]
    """Seconds from submission to the first token; 0 if unknown."""
    step_rewards: Annotated[list[StepReward], Meta(max_length=1 << 20)] = []
    """Process rewards, ascending by index; none: the reward is for the whole."""
    teacher_logprobs: Floats | None = None
    """[T] log-probability of each token under a teacher that scored the rollout."""
    retries: Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=16)] = {}
    """Requests for this sample that failed before, by reason: `aborted` by an engine, `connection lost`, …"""
    rewards: Annotated[dict[Annotated[str, Meta(min_length=1, max_length=64)], float], Meta(max_length=256)] = {}
    """Name of a reward → its value; `reward` is their weighted sum. A reward that does not apply is absent."""
    unscored: Annotated[str, Meta(max_length=128)] = ""
    """Why scoring failed, if the run takes failed scores as 0; empty: it was scored."""
    score_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after `finished` that scoring took, failed attempts and pauses included, the wait for the group's other
    samples not; 0: it was not measured."""
    actor: Annotated[str, Meta(max_length=512)] = ""
    """The actor that had it sampled and scored, by its own clock; empty: it was not recorded."""
    pieces: Annotated[list[GeneratorSpan], Meta(max_length=1 << 16)] = []
    """Which generator made which tokens, if one was lost and another one continued the sequence; empty: `generator`
    made all, otherwise it made the last piece."""

    def __post_init__(self) -> None:
        convert(self, prompt_ids=Tokens, teacher_logprobs=Floats)


class RolloutGroup(Record):
    """The G samples of one prompt; the unit of admission, of the advantage and of accounting."""

    group_id: Name
    prompt_key: Name
    """Identifies the task's item, so that a run can show that no prompt was trained on twice."""
    rollouts: Annotated[list[Rollout], Meta(min_length=1, max_length=4096)]


def require_spans(spans: Sequence[VersionSpan], length: int, first: int = 0) -> None:
    """Raises ValueError unless the spans start at `first`, ascend, and start within the `length` tokens from there."""
    if length == 0:
        return
    if not spans or spans[0].start != first:
        raise ValueError(f"version spans must start at token {first}, got {spans[:1]}")
    before = first - 1
    for span in spans:
        if not before < span.start < first + length:
            raise ValueError(f"version span {span} does not fit after token {before} of {first + length} tokens")
        before = span.start


def version_array(spans: list[VersionSpan], length: int) -> NDArray[np.int64]:
    """[T] the version of each of `length` tokens.

    Raises ValueError when the spans do not start at 0, do not ascend, or start beyond the tokens.
    """
    require_spans(spans, length)
    versions = np.empty(length, np.int64)
    for span in spans:
        versions[span.start :] = span.version
    return versions


def versions_of_tokens(spans: list[VersionSpan], length: int) -> list[int]:
    """`version_array` as a list of Python's integers."""
    versions: list[int] = version_array(spans, length).tolist()
    return versions


def versions_of(turn: Turn) -> set[int]:
    """All versions that a turn was computed under: those of its tokens and of the prefills that they rest on."""
    return {span.version for span in turn.token_versions} | {span.version for span in turn.prefill_versions}


Value = float | int | str
"""One of the values of a process's status (messages.Status): a figure, or a text such as its phase."""
FIRST_FAILED = "first_failed/"
"""Begins the name of a value in an actor's Status: details of the first group that failed by the reason after it."""
Url = Annotated[str, Meta(max_length=4096, pattern=r"^https?://[!-~]+$")]
"""HTTP address of a generator."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A generator that gets requests: its address, and the version that it stamps."""

    url: Url
    version: Version
    incarnation: Incarnation


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer tells the actors, and writes for people (RunConfig.routes_file): the newest version, and the
    generators that get requests.

    A generator that is not listed gets none: it has not received a version since it joined, is too far behind, does not
    answer, or may hold a torn one.
    """

    version: Version
    generators: dict[Name, Route]
