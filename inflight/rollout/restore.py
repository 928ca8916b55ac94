"""The rollouts of a run that goes on from a checkpoint: which are still true, and which wait to be trained on."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.groups import attempt_of, index_of
from inflight.rollout.books import Books
from inflight.rollout.stream import Reader, Writer
from inflight.rollout.waiting import StoredGroup
from inflight.types import RolloutGroup


def restore(path: Path, books: Books, version: int) -> list[StoredGroup]:
    """Rewrites the rollout file for a run that goes on from `version`; the groups to be trained on, oldest first.

    A group with a token of a later version leaves the file: that version was undone, another one will bear its number,
    and the tag would lie. Its question is asked again. So is that of a torn frame. So does a later attempt at a
    question whose earlier answer `books` do not know yet to be too old. All others stay; those that are the newest
    attempt at a question that is not settled in `books` are returned. The file is replaced whole. Reads all of it once.

    Raises StreamError when the file is none of ours, OSError when the disk is full.
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
    """The newest version that had a part in a group, by sampling or by prefill; -1 when none is named."""
    newest = -1
    for rollout in group.rollouts:
        sampled = (span.version for span in rollout.turn.token_versions)
        prefilled = (span.version for span in rollout.turn.prefill_versions)
        newest = max([newest, *sampled, *prefilled])
    return newest
