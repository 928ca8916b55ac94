"""`packed_logprobs` of a patched vLLM: sampled tokens, their log-probabilities and kept sets in one field of an answer.

In JSON the field is base64. Its bytes are little endian: the number of tokens T as int32, `counts` [T] int32, then S
token ids as int32 and S log-probabilities as float32, S the sum of the counts. Of each token that is the sampled one
first, then the most probable others that could have been sampled, as many as were requested. So a request for N beside
the sampled token gets the whole set that it was sampled from wherever a count is below N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from inflight.arrays import MAX_LENGTH, MAX_SET, Sets

MAX_BYTES = 1 << 26
"""Of a field, decoded."""


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


def unpack(data: bytes, requested: int) -> Drawn:
    """The tokens in a field of an answer to a request for `requested` log-probabilities beside the sampled token's; an
    empty field has none.

    Raises ValueError with the reason for bytes that are not such a field.
    """
    data = data or bytes(4)
    if len(data) % 4 or not 4 <= len(data) <= MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are no packed log-probabilities")
    numbers = np.frombuffer(data, "<i4")
    length = int(numbers[0])
    counts = numbers[1 : length + 1]
    if not 0 <= length <= MAX_LENGTH or len(counts) != length:
        raise ValueError(f"packed log-probabilities of {length} tokens in {len(data)} bytes")
    sizes = counts.tolist()  # most fields are of 32 tokens: numpy takes longer for each of the three below
    least = min(sizes, default=1)
    most = max(sizes, default=1)
    entries = sum(sizes)
    if least < 1 or most > requested + 1:
        raise ValueError(
            f"{least} to {most} packed log-probabilities of a token, {requested} beside its own were requested"
        )
    if len(numbers) != 1 + length + 2 * entries:
        raise ValueError(f"{len(data)} bytes, and {entries} packed log-probabilities of {length} tokens were announced")
    ids = numbers[1 + length : 1 + length + entries]
    if (lowest := np.minimum.reduce(ids, initial=0)) < 0:
        raise ValueError(f"{lowest} is no token id")
    logprobs = numbers[1 + length + entries :].view("<f4")
    sampled = slice(None) if entries == length else np.add.accumulate(counts) - counts
    kept = _kept(counts, ids, requested, most) if requested else None
    return Drawn(ids[sampled], logprobs[sampled], kept)


def _kept(counts: NDArray[np.int32], ids: NDArray[np.int32], requested: int, most: int) -> Sets:
    """The sets, without those that may be larger than what was requested; `most` is the size of the largest one."""
    below = min(requested, MAX_SET)
    if most >= below:
        whole = counts < below
        ids = ids[np.repeat(whole, counts)]
        counts = np.where(whole, counts, 0)
    return Sets.of_arrays(counts.astype("<u2"), ids)
