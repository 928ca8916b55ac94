"""Finished groups that wait for the trainer: encoded, because decoded they take 5 to 10 times the memory."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from inflight.config import RunConfig
from inflight.groups import index_of
from inflight.rollout.frames import decode_frame, encode_frame
from inflight.types import RolloutGroup

REMEMBERED = 64
"""Number of last groups from which the size of the next one is estimated."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group encoded as in the rollout file, with its name."""

    name: str
    frame: bytes
    oldest: int | None = None
    """The oldest version that has sampled one of its tokens; None: unknown."""

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        """Encodes a group. Raises StreamError when it is too large to be written."""
        versions = [span.version for rollout in group.rollouts for span in rollout.turn.token_versions]
        return cls(group.group_id, encode_frame(group), min(versions, default=None))

    @property
    def index(self) -> int | None:
        """The index of its question."""
        return index_of(self.name)

    def group(self) -> RolloutGroup:
        """The group itself, decoded at each call."""
        return decode_frame(self.frame)


class Waiting:
    """Groups in the order of their arrival, and the bytes of memory that they take."""

    def __init__(self, groups: Iterable[StoredGroup], typical: float) -> None:
        """`typical`: expected bytes of a group until the first one has arrived."""
        self._queue: collections.deque[StoredGroup] = collections.deque()
        self._indices: set[int] = set()
        self._sizes = collections.deque([typical], maxlen=REMEMBERED)
        self.nbytes = 0
        self._came = False
        for group in groups:
            self.append(group)

    @property
    def typical(self) -> float:
        """Expected bytes of a group, from the last ones."""
        return fmean(self._sizes)

    @property
    def indices(self) -> frozenset[int]:
        """The indices of the groups' questions."""
        return frozenset(self._indices)

    def ages(self, version: int) -> dict[int, int]:
        """Versions between the oldest token of a group and `version` → how many groups."""
        oldest = [group.oldest for group in self._queue if group.oldest is not None]
        return dict(collections.Counter(version - each for each in oldest))

    def append(self, group: StoredGroup) -> None:
        """Appends a group to the queue."""
        if not self._came:
            self._sizes.clear()  # removes the initial estimate
            self._came = True
        self._queue.append(group)
        self._sizes.append(len(group.frame))
        self.nbytes += len(group.frame)
        if group.index is not None:
            self._indices.add(group.index)

    def pop(self, at: int) -> StoredGroup:
        """Removes and returns the group at a position; the oldest is at 0."""
        group = self._queue[at]
        del self._queue[at]
        self.nbytes -= len(group.frame)
        self._indices.discard(-1 if group.index is None else group.index)
        return group

    def __getitem__(self, at: int) -> StoredGroup:
        return self._queue[at]

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, index: int) -> bool:
        return index in self._indices


def most_bytes(config: RunConfig) -> float:
    """Largest encoded size of a group in bytes, as far as it is known before one has arrived.

    A token id and a log-probability take 4 bytes each, a kept set 2 and 4 per id. Other recorded data is not counted,
    because most runs do not record it.
    """
    kept = 2 + 4 * config.rollout.kept_tokens if config.rollout.cuts else 0
    return float(config.rollout.group_size * config.generator.max_model_len * (8 + kept))
