"""The rollouts of a run that resumes from a checkpoint: which stay valid, and which are still to be trained on."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.groups import attempt_of, index_of
from inflight.rollout.books import Books
from inflight.rollout.stream import Reader, Writer
from inflight.rollout.waiting import StoredGroup
from inflight.types import RolloutGroup


def restore(path: Path, books: Books, version: int) -> list[StoredGroup]:
    """Rewrites the rollout file for a run that resumes from `version`; returns the groups to be trained on, oldest
    first.

    Removed from the file are: groups with a token of a later version (that version is undone, another one will get its
    number, and the tag would be wrong), torn frames, and later attempts at a question whose earlier group is not yet
    too stale according to `books`. Their questions are re-queued. All other groups stay; those that are the newest
    attempt at a question not settled in `books` are returned. The file is replaced atomically, and read whole once.

    Raises StreamError when the file is not a rollout stream, OSError when the disk is full.
    """
    if not path.exists() or not path.stat().st_size:
        return []
    settled, seen = books.settled, set[str]()
    waiting: list[StoredGroup] = []
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with Writer(partial) as kept:
        for group in Reader(path):
            name = group.group_id
            index, attempt = index_of(name), attempt_of(name)
            if newest_version(group) > version or index is None or name in seen:
                continue
            newest = books.too_old.get(index, 0)
            if index not in settled and attempt > newest:
                continue
            seen.add(name)
            stored = StoredGroup.of(group)
            kept.append_frame(stored.frame)
            if index not in settled and attempt == newest:
                waiting.append(stored)
    os.replace(partial, path)
    return waiting


def newest_version(group: RolloutGroup) -> int:
    """The newest version that took part in a group, by sampling or prefill; -1 when there is none."""
    newest = -1
    for rollout in group.rollouts:
        sampled = (span.version for span in rollout.turn.token_versions)
        prefilled = (span.version for span in rollout.turn.prefill_versions)
        newest = max([newest, *sampled, *prefilled])
    return newest
