"""`packed_logprobs` of a patched vLLM: sampled tokens, their log-probabilities and kept sets in one field of an answer.

In JSON the field is base64. Its bytes are little endian: the number of tokens T as int32, `counts` [T] int32, then S
token ids as int32 and S log-probabilities as float32, S the sum of the counts. Of each token that is the sampled one
first, then the most probable others that could have been sampled, as many as were requested. So a request for N beside
the sampled token gets the whole set that it was sampled from wherever a count is below N.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from inflight.arrays import MAX_LENGTH, MAX_SET, Sets

MAX_BYTES = 1 << 26
"""Of a field, decoded."""
_LENGTH = struct.Struct("<i")


class Drawn(msgspec.Struct, frozen=True, eq=False):
    """T sampled tokens."""

    token_ids: NDArray[np.int32]
    """[T]"""
    logprobs: NDArray[np.float32]
    """[T] nats; may hold NaN."""
    kept: Sets | None
    """[T] the sets that they were sampled from, the sampled token first; an empty one is not known whole. None where no
    sets were requested."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, length: int) -> Drawn:
        """The first `length` of them."""
        kept = None if self.kept is None else self.kept.first(length)
        return Drawn(self.token_ids[:length], self.logprobs[:length], kept)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Drawn:
        """One after the other; there must be one, and all have sets or none has."""
        if len(parts) == 1:
            return parts[0]
        sets = [each.kept for each in parts if each.kept is not None]
        return Drawn(
            np.concatenate([each.token_ids for each in parts]),
            np.concatenate([each.logprobs for each in parts]),
            Sets.joined(sets) if sets else None,
        )


def tokens_in(data: bytes) -> int:
    """Number of tokens in a field, by its head and its size; an empty field has none. Raises ValueError with the reason
    for bytes that can't be a field; `unpack` checks the rest."""
    if not data:
        return 0
    if len(data) % 4 or len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are no packed log-probabilities")
    length: int = _LENGTH.unpack_from(data)[0]
    entries, odd = divmod(len(data) // 4 - 1 - length, 2)
    if odd or not 0 <= length <= min(entries, MAX_LENGTH) or (entries and not length):
        raise ValueError(f"packed log-probabilities of {length} tokens in {len(data)} bytes")
    return length


def unpack(fields: Sequence[bytes], requested: int) -> Drawn:
    """The tokens in fields of an answer to a request for `requested` log-probabilities beside the sampled token's,
    those of one field after those of the other.

    Raises ValueError with the reason for bytes that are not such fields.
    """
    heads: list[bytes] = []
    ids_of: list[bytes] = []
    logprobs_of: list[bytes] = []
    lengths: list[int] = []
    entries: list[int] = []
    for data in fields:  # slices of bytes: numpy's take longer than what is in most fields, which have 32 tokens
        if length := tokens_in(data):
            middle = 4 + 4 * length
            end = (middle + len(data)) // 2
            heads.append(data[4:middle])
            ids_of.append(data[middle:end])
            logprobs_of.append(data[end:])
            lengths.append(length)
            entries.append((end - middle) // 4)
    counts = np.frombuffer(b"".join(heads), "<i4")
    ids = np.frombuffer(b"".join(ids_of), "<i4")
    logprobs = np.frombuffer(b"".join(logprobs_of), "<f4")
    least = int(counts.min()) if lengths else 1
    most = int(counts.max()) if lengths else 1
    if least < 1 or most > requested + 1:
        raise ValueError(
            f"{least} to {most} packed log-probabilities of a token, {requested} beside its own were requested"
        )
    _require_entries(counts, lengths, entries)
    if (lowest := int(ids.min(initial=0))) < 0:
        raise ValueError(f"{lowest} is no token id")
    sampled = slice(None) if len(ids) == len(counts) else np.add.accumulate(counts, dtype=np.int64) - counts
    kept = _kept(counts, ids, requested, most) if requested else None
    return Drawn(ids[sampled], logprobs[sampled], kept)


def _require_entries(counts: NDArray[np.int32], lengths: list[int], entries: list[int]) -> None:
    """Raises ValueError unless the counts of each field add up to its entries."""
    starts = np.add.accumulate([0, *lengths[:-1]])
    announced = np.add.reduceat(counts, starts, dtype=np.int64).tolist() if lengths else []
    for length, said, there in zip(lengths, announced, entries, strict=True):
        if said != there:
            raise ValueError(f"{there} packed log-probabilities where {said} of {length} tokens were announced")


def _kept(counts: NDArray[np.int32], ids: NDArray[np.int32], requested: int, most: int) -> Sets:
    """The sets, without those that may be larger than what was requested; `most` is the size of the largest one."""
    below = min(requested, MAX_SET)
    if most >= below:
        whole = counts < below
        ids = ids[np.repeat(whole, counts)]
        counts = np.where(whole, counts, 0)
    return Sets.of_arrays(counts.astype("<u2"), ids)
