"""Finished groups that wait for the trainer: encoded, because decoded they take 5 to 10 times the memory."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from inflight.config import RunConfig
from inflight.groups import index_of
from inflight.rollout.stream import decode_frame, encode_frame
from inflight.types import RolloutGroup

REMEMBERED = 64
"""Groups that the size of the next one is told from."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as it lies in the rollout file, under its name."""

    name: str
    frame: bytes

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        """Raises StreamError for a group that is too large to be written."""
        return cls(group.group_id, encode_frame(group))

    @property
    def index(self) -> int | None:
        """The question that it answers."""
        return index_of(self.name)

    def group(self) -> RolloutGroup:
        """The group itself, decoded anew at each call."""
        return decode_frame(self.frame)


class Waiting:
    """Groups in the order in which they came, and the bytes of memory that they take."""

    def __init__(self, groups: Iterable[StoredGroup], typical: float) -> None:
        """`typical`: bytes that a group may have, for as long as none has come."""
        self._queue: collections.deque[StoredGroup] = collections.deque()
        self._indices: set[int] = set()
        self._sizes = collections.deque([typical], maxlen=REMEMBERED)
        self.nbytes = 0
        self._came = False
        for group in groups:
            self.append(group)

    @property
    def typical(self) -> float:
        """Bytes of a group, by the last ones that came."""
        return fmean(self._sizes)

    @property
    def indices(self) -> frozenset[int]:
        """The questions that the groups answer."""
        return frozenset(self._indices)

    def append(self, group: StoredGroup) -> None:
        """A group more, behind the others."""
        if not self._came:
            self._sizes.clear()  # what was only supposed
            self._came = True
        self._queue.append(group)
        self._sizes.append(len(group.frame))
        self.nbytes += len(group.frame)
        if group.index is not None:
            self._indices.add(group.index)

    def pop(self, at: int = 0) -> StoredGroup:
        """Takes out the group at a place, the oldest without one."""
        group = self._queue[at]
        del self._queue[at]
        self.nbytes -= len(group.frame)
        self._indices.discard(-1 if group.index is None else group.index)
        return group

    def __getitem__(self, at: int) -> StoredGroup:
        return self._queue[at]

    def __iter__(self) -> Iterator[StoredGroup]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, index: int) -> bool:
        return index in self._indices


def most_bytes(config: RunConfig) -> float:
    """What a group takes at the most, encoded, as far as that is known before one has come.

    A token's number takes up to 5 bytes, a log-probability 9. What is recorded beside them is left out but for kept
    sets: it is not the rule.
    """
    kept = 5 * config.rollout.kept_tokens if config.rollout.cuts else 0
    return float(config.rollout.group_size * config.generator.max_model_len * (14 + kept))
