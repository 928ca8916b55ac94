"""The rollouts of a run that resumes from a checkpoint: which stay valid, and which are still to be trained on."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.groups import attempt_of, index_of
from inflight.rollout.books import Books
from inflight.rollout.frames import CONTINUED
from inflight.rollout.part import Part, start_of
from inflight.rollout.stream import parts, recorded, written
from inflight.rollout.waiting import StoredGroup
from inflight.types import RolloutGroup, versions_of


def restore(path: Path, books: Books, version: int) -> list[StoredGroup]:
    """Rewrites the rollout files for a run that resumes from `version`; returns the groups to be trained on, oldest
    first.

    Removed are: groups with a token of a later version (that version is undone, another one will get its number, and
    the tag would be wrong), torn frames, and later attempts at a question whose earlier group is not yet too stale
    according to `books`. Their questions are re-queued. All other groups stay; those that are the newest attempt at a
    question not settled in `books` are returned. Each file is replaced atomically, and read whole once. A start that
    ends between two of them is repeated by the next one: what was removed before stays removed.

    Raises StreamError when a file is no part of a rollout stream, OSError when the disk is full.
    """
    if not recorded(path) or not path.stat().st_size:
        return []
    sorting = _Sorting(books, version)
    for part in parts(path):
        _rewrite(part, sorting)
    return sorting.waiting


class _Sorting:
    """Decides on one group after the other."""

    def __init__(self, books: Books, version: int) -> None:
        self._books = books
        self._settled = books.settled
        self._version = version
        self._seen: set[str] = set()
        self.waiting: list[StoredGroup] = []
        """Those to be trained on."""

    def stored(self, group: RolloutGroup) -> StoredGroup | None:
        """The group as it stays in the file; None: it is removed."""
        name = group.group_id
        index = index_of(name)
        attempt = attempt_of(name)
        if newest_version(group) > self._version or index is None or name in self._seen:
            return None
        newest = self._books.too_old.get(index, 0)
        if index not in self._settled and attempt > newest:
            return None
        self._seen.add(name)
        stored = StoredGroup.of(group)
        if index not in self._settled and attempt == newest:
            self.waiting.append(stored)
        return stored


def _rewrite(part: Part, sorting: _Sorting) -> None:
    partial = part.path.with_name(part.path.name + ".partial")
    with partial.open("wb", buffering=0) as file:
        written(file, start_of(part.stream, part.number))
        for group in part:
            if (stored := sorting.stored(group)) is not None:
                written(file, stored.frame)
        if part.continued:
            written(file, CONTINUED)
    os.replace(partial, part.path)


def newest_version(group: RolloutGroup) -> int:
    """The newest version that took part in a group, by sampling or prefill; -1 when there is none."""
    return max((version for rollout in group.rollouts for version in versions_of(rollout.turn)), default=-1)
