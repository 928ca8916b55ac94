"""Compares the number of groups that a run says it recorded with its rollout file: none may be lost, doubled or cut.

The file itself can't show what is missing from it. The run can, in files that other code writes at other times:

* metrics.jsonl, one line per step: groups granted = in flight + failed + produced, and the questions trained on.
  A group is written before it is acknowledged, so that the file holds at least what a line says was produced.
* summary.json, at the end of the run: rollouts and tokens in the file.
* swaps.jsonl: which generator has acknowledged which version.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from inflight.audit.replay import AuditError
from inflight.groups import group_id, index_of
from inflight.metrics import METRICS_FILE, SWAPS_FILE, read_lines
from inflight.types import Rollout, RolloutGroup, VersionSpan

SUMMARY_FILE = "summary.json"
NAMED = 5
"""Most groups that a fault names; the rest is a number."""


@dataclass
class RolloutCensus:
    """The content of a rollout file, counted group by group."""

    groups: Counter[str] = field(default_factory=Counter)
    """Group → how often it occurs."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Group → number of its rollouts, without repetitions."""
    named: Counter[str] = field(default_factory=Counter)
    """Rollout → how often it occurs."""
    tokens: int = 0
    stamped: set[tuple[str, int]] = field(default_factory=set)
    """(generator, version) of every span."""

    @property
    def rollouts(self) -> int:
        """Number of all rollouts."""
        return self.named.total()

    def add(self, group: RolloutGroup) -> None:
        """Counts one more group."""
        self.groups[group.group_id] += 1
        self.sizes[group.group_id] = len({rollout.rollout_id for rollout in group.rollouts})
        self.named.update(rollout.rollout_id for rollout in group.rollouts)
        for rollout in group.rollouts:
            self.tokens += len(rollout.turn.token_ids)
            self.stamped |= _stamped(rollout)


def _stamped(rollout: Rollout) -> set[tuple[str, int]]:
    """(generator, version) pairs of a rollout; if others continued it, each generator with its own piece."""
    makers = [(piece.start, piece.generator) for piece in rollout.pieces] or [(0, rollout.generator)]
    spans, length = rollout.turn.token_versions, len(rollout.turn.token_ids)
    found = set()
    for (start, maker), (end, _) in itertools.pairwise([*makers, (length, "")]):
        for span, after in itertools.pairwise([*spans, VersionSpan(length, 0)]):
            if span.start < end and after.start > start:
                found.add((maker, span.version))
    return found


class _SummaryFields(msgspec.Struct):
    """The fields of summary.json (inflight/report/summary.py) that are needed here."""

    steps: int
    rollouts: int | None
    tokens: int | None


def faults(census: RolloutCensus, folder: Path, *, group_size: int, start_version: int) -> list[str]:
    """Contradictions to the run's own counts, one line each. Raises AuditError when one of its files is damaged."""
    try:
        steps, swaps = read_lines(folder / METRICS_FILE), read_lines(folder / SWAPS_FILE)
        summary = _summary(folder / SUMMARY_FILE, len(steps))
        found = [*_doubled(census), *_cut(census, group_size), *_lost(census, steps)]
        if summary is not None:
            found += [*_unlike(summary, census), *_unknown_versions(census, swaps, start_version)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        names = f"{METRICS_FILE}, {SWAPS_FILE} or {SUMMARY_FILE}"
        raise AuditError(f"{folder}: {names} is damaged: {error!r}") from None
    return found


def unknown(folder: Path) -> list[str]:
    """Why the number of groups is unknown; empty when it is known."""
    if (folder / METRICS_FILE).is_file() or (folder / SUMMARY_FILE).is_file():
        return []
    return [f"there is no {METRICS_FILE} and no {SUMMARY_FILE} to say how many groups the run had recorded"]


def _doubled(census: RolloutCensus) -> list[str]:
    for counted in (census.groups, census.named):  # a group may be repeated under another name
        if again := [name for name, count in counted.items() if count > 1]:
            return [f"{_names(again)} recorded more than once"]
    return []


def _cut(census: RolloutCensus, group_size: int) -> list[str]:
    return [
        f"{_names([name for name, size in census.sizes.items() if size == short])} {short} of {group_size} rollouts"
        for short in sorted(set(census.sizes.values()) - {group_size})
    ]


def _lost(census: RolloutCensus, steps: list[dict[str, Any]]) -> list[str]:
    if not steps:
        return []
    last, there = steps[-1], len(census.groups)
    found = []
    trained = {int(question) for step in steps for question in step.get("questions", [])}
    absent = sorted(trained - {number for name in census.groups if (number := index_of(name)) is not None})
    if absent:
        found.append(f"{_names(map(group_id, absent))} trained on, but not recorded")
    produced = int(last["groups_granted"]) - int(last["groups_in_flight"]) - sum(last["groups_failed"].values())
    if produced > there:
        found.append(f"the run had produced {produced} groups by its last step, {there} are recorded")
    return found


def _summary(path: Path, steps: int) -> _SummaryFields | None:
    """None without a summary of all these steps: the run has not ended, or was resumed and has not ended since."""
    if not path.is_file():
        return None
    summary = msgspec.json.decode(path.read_bytes(), type=_SummaryFields)
    return summary if summary.steps == steps or not steps else None


def _unlike(summary: _SummaryFields, census: RolloutCensus) -> list[str]:
    counted: Mapping[str, tuple[int | None, int]] = {
        "rollouts": (summary.rollouts, census.rollouts), "tokens": (summary.tokens, census.tokens),
    }  # fmt: skip
    return [
        f"{SUMMARY_FILE} says {said} {what}, {there} are recorded"
        for what, (said, there) in counted.items()
        if said is not None and said != there
    ]


def _unknown_versions(census: RolloutCensus, swaps: list[dict[str, Any]], start_version: int) -> list[str]:
    """Versions that generators have stamped, but were never sent. A generator that died may have stamped a version
    without acknowledging it; the version that it started with was not sent either."""
    if not swaps:
        return []
    events = ("committed", "failed")
    sent = {(str(swap["generator"]), int(swap["version"])) for swap in swaps if swap["event"] in events}
    strange = sorted((name, version) for name, version in census.stamped - sent if version > start_version)
    return [f"{name} tagged tokens with version {version}, which it never acknowledged" for name, version in strange]


def _names(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return f"{', '.join(known[:NAMED])}{more}:"
