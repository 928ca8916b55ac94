"""The rollouts of a run that goes on from a checkpoint: which are still true, and which wait to be trained on."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.groups import index_of
from inflight.rollout.books import Books
from inflight.rollout.stream import Reader, Writer
from inflight.types import RolloutGroup


def restore(path: Path, books: Books, version: int) -> list[RolloutGroup]:
    """Rewrites the rollout file for a run that goes on from `version`; the groups to be trained on, oldest first.

    A group with a token of a later version leaves the file: that version was undone, another one will bear its number,
    and the tag would lie. Its question is asked again. So is that of a torn frame. All others stay; those whose
    question is not settled in `books` are returned. The file is replaced whole. Reads all of it once.

    Raises StreamError when the file is none of ours, OSError when the disk is full.
    """
    if not path.exists() or not path.stat().st_size:
        return []
    settled, seen = books.settled, set[int]()
    waiting: list[RolloutGroup] = []
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with Writer(partial) as kept:
        for group in Reader(path):
            index = index_of(group.group_id)
            if newest_version(group) > version or index is None or index in seen:
                continue
            seen.add(index)
            kept.append(group)
            if index not in settled:
                waiting.append(group)
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
