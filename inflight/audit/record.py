"""A run's rollout file as the audit reads it: the rollouts to be replayed, and a census of the whole file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from inflight.audit.counts import RolloutCensus
from inflight.audit.replay import AuditError
from inflight.rollout.stream import Reader, recorded
from inflight.types import Rollout


@dataclass(frozen=True, slots=True)
class RecordedRollouts:
    """The result of reading the file."""

    rollouts: list[Rollout]
    """Those to be replayed."""
    census: RolloutCensus
    """That of the whole file."""
    torn: str | None
    """The incomplete end of the file, if it has one."""


def read(path: Path, limit: int | None) -> RecordedRollouts:
    """All rollouts, or `limit` of them, sampled at random with a fixed seed; those of a long run may exceed the memory.

    Raises AuditError when there is no file, StreamError when it is damaged before its end.
    """
    if not recorded(path):
        raise AuditError(f"{path} does not exist: the run must be started with rollout.keep=true")
    reader = Reader(path)
    census = RolloutCensus()
    rollouts: list[Rollout] = []
    for group in reader:
        census.add(group)
        if limit is None:
            rollouts += group.rollouts
    if limit is not None:
        chosen = set(random.Random(0).sample(range(census.rollouts), min(limit, census.rollouts)))
        numbered = enumerate(rollout for group in reader for rollout in group.rollouts)
        rollouts = [rollout for number, rollout in numbered if number in chosen]
    return RecordedRollouts(rollouts, census, reader.torn)
