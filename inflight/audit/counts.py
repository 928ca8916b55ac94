"""Compares the number of groups that a run says it recorded with its rollout file: none may be lost, doubled or cut.

The file itself can't show what is missing from it. The run can, in files that other code writes at other times:

* metrics.jsonl, one line per step: groups granted = in flight + failed + produced, the questions trained on and the
  number of their tokens. A group is written before it is acknowledged, so that the file holds at least what a line
  says was produced.
* summary.json, at the end of the run: rollouts and tokens in the file, and how many steps there were.
* swaps.jsonl: which generator has acknowledged which version.
* versions/: the weights of a version are written before its step's line, so that lines lost at the end are noticed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from inflight.groups import attempt_of, group_id, index_of
from inflight.metrics import METRICS_FILE, SUMMARY_FILE, SWAPS_FILE, read_lines
from inflight.types import Rollout, RolloutGroup, VersionSpan

NAMED = 5
"""Most groups that a fault names; the rest is a number."""


@dataclass(frozen=True, slots=True)
class RolloutNames:
    """The rollouts of a group; `attempt` counts the question's earlier groups."""

    attempt: int
    names: tuple[str, ...]


@dataclass
class RolloutCensus:
    """The content of a rollout file, counted group by group."""

    groups: Counter[str] = field(default_factory=Counter)
    """Group → how often it occurs."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Group → number of its rollouts, without repetitions."""
    named: Counter[str] = field(default_factory=Counter)
    """Rollout → how often it occurs."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Rollout → number of its tokens."""
    members: dict[int, RolloutNames] = field(default_factory=dict)
    """Question → rollouts of the last of its groups: earlier ones were too stale to be trained on."""
    copies: Counter[int] = field(default_factory=Counter)
    """Hash of what was sampled, and when → how often it occurs, whatever its name."""
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
        if (question := index_of(group.group_id)) is not None:
            attempt = attempt_of(group.group_id)
            if question not in self.members or self.members[question].attempt <= attempt:
                names = tuple(rollout.rollout_id for rollout in group.rollouts)
                self.members[question] = RolloutNames(attempt, names)
        for rollout in group.rollouts:
            self.lengths[rollout.rollout_id] = len(rollout.turn.token_ids)
            self.tokens += len(rollout.turn.token_ids)
            self.stamped |= _stamped(rollout)
            self.copies[_content(rollout)] += 1


def _content(rollout: Rollout) -> int:
    """A hash of what no two requests have in common: the tokens, how probable they were, and when they were sampled."""
    turn = rollout.turn
    arrays = (rollout.prompt_ids.values, turn.token_ids.values, turn.logprobs.values)
    return hash((*(each.tobytes() for each in arrays), rollout.started, rollout.finished))


def _stamped(rollout: Rollout) -> set[tuple[str, int]]:
    """(generator, version) pairs of a rollout; if others continued it, each generator with its own piece."""
    makers = [(piece.start, piece.generator) for piece in rollout.pieces] or [(0, rollout.generator)]
    spans = rollout.turn.token_versions
    length = len(rollout.turn.token_ids)
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


@dataclass(frozen=True, slots=True)
class Told:
    """What the run says of itself."""

    steps: list[dict[str, Any]] | None
    """The lines of metrics.jsonl; None without such a file."""
    swaps: list[dict[str, Any]]
    summary: _SummaryFields | None
    """None before the end of the run."""
    newest: int | None
    """The newest version of which the weights were kept."""
    torn: bool
    """Whether the last line of metrics.jsonl is incomplete."""

    @classmethod
    def read(cls, folder: Path, newest: int | None) -> Told:
        """The files of a run folder. Raises ValueError when one is damaged."""
        metrics = folder / METRICS_FILE
        path = folder / SUMMARY_FILE
        summary = msgspec.json.decode(path.read_bytes(), type=_SummaryFields) if path.is_file() else None
        torn = metrics.is_file() and not (metrics.read_bytes() or b"\n").endswith(b"\n")
        return cls(
            read_lines(metrics) if metrics.is_file() else None, read_lines(folder / SWAPS_FILE), summary, newest, torn
        )

    def gaps(self, start_version: int) -> list[str]:
        """Lines of metrics.jsonl that are lost."""
        if self.steps is None:
            return []
        numbers = [int(step["step"]) for step in self.steps if "step" in step]
        found = [
            f"{METRICS_FILE} has no line between those of the steps {before} and {after}"
            for before, after in itertools.pairwise(numbers)
            if after != before + 1
        ]
        if numbers and numbers[0] > start_version + 1:
            found.insert(0, f"{METRICS_FILE} begins with step {numbers[0]}, the run with {start_version + 1}")
        if self.summary is not None and self.summary.steps != len(self.steps):
            found.append(f"{SUMMARY_FILE} says {self.summary.steps} steps, {METRICS_FILE} has {len(self.steps)}")
        elif self.newest is not None and (numbers or not self.steps):
            last = numbers[-1] if numbers else start_version
            if self.newest > last + 1:  # that of the next step may be written already
                found.append(f"version {self.newest} was kept, {METRICS_FILE} ends with step {last}")
        return found


def faults(census: RolloutCensus, told: Told, *, group_size: int, start_version: int) -> list[str]:
    """Contradictions to the run's own counts, one line each. Raises ValueError and others when a line is damaged."""
    found = [*_doubled(census), *_cut(census, group_size), *told.gaps(start_version), *_lost(census, told.steps or [])]
    if told.summary is not None:
        found += [*_unlike(told.summary, census), *_unknown_versions(census, told.swaps)]
    return found


def unknown(told: Told) -> list[str]:
    """Why the number of groups is unknown; empty when it is known."""
    others = f" and no {SUMMARY_FILE}" if told.summary is None else ""
    found = []
    if told.steps is None:
        found.append(f"there is no {METRICS_FILE}{others} to say how many groups the run had recorded")
    elif told.torn:
        found.append(f"the last line of {METRICS_FILE} is torn")
    elif not told.steps and others:
        found.append(f"{METRICS_FILE} has no lines, and there is no {SUMMARY_FILE}, to say how many groups there are")
    if told.steps and told.steps[-1].get("swaps") and not told.swaps:
        found.append(f"there is no {SWAPS_FILE} to say which versions were sent to which generator")
    return found


def _doubled(census: RolloutCensus) -> list[str]:
    for counted in (census.groups, census.named):  # a group may be repeated under another name
        if again := [name for name, count in counted.items() if count > 1]:
            return [f"{_names(again)} recorded more than once"]
    if (extra := census.copies.total() - len(census.copies)) > 0:
        return [f"{extra} rollouts are copies of others, under other names"]
    return []


def _cut(census: RolloutCensus, group_size: int) -> list[str]:
    return [
        f"{_names([name for name, size in census.sizes.items() if size == short])} {short} of {group_size} rollouts"
        for short in sorted(set(census.sizes.values()) - {group_size})
    ]


def _lost(census: RolloutCensus, steps: list[dict[str, Any]]) -> list[str]:
    if not steps:
        return []
    last = steps[-1]
    there = len(census.groups)
    found = []
    trained = {int(question) for step in steps for question in step.get("questions", [])}
    absent = sorted(trained - {number for name in census.groups if (number := index_of(name)) is not None})
    if absent:
        found.append(f"{_names(map(group_id, absent))} trained on, but not recorded")
    produced = int(last["groups_granted"]) - int(last["groups_in_flight"]) - sum(last["groups_failed"].values())
    if produced > there:
        found.append(f"the run had produced {produced} groups by its last step, {there} are recorded")
    return found + [line for step in steps if (line := _shortened(census, step)) is not None]


def _shortened(census: RolloutCensus, step: Mapping[str, Any]) -> str | None:
    """Whether the rollouts of a step have the number of tokens that it was trained on; those that are lost are reported
    elsewhere."""
    groups = [census.members.get(int(question)) for question in step.get("questions", [])]
    if "tokens_trained" not in step or not groups or None in groups:
        return None
    names = {name for group in groups if group is not None for name in group.names} - set(step["left_out"])
    recorded = sum(census.lengths[name] for name in names)
    trained = int(step["tokens_trained"] + step["tokens_masked"])
    if recorded == trained:
        return None
    return f"step {step['step']} was trained on {trained} tokens, its rollouts have {recorded}"


def _unlike(summary: _SummaryFields, census: RolloutCensus) -> list[str]:
    counted: Mapping[str, tuple[int | None, int]] = {
        "rollouts": (summary.rollouts, census.rollouts),
        "tokens": (summary.tokens, census.tokens),
    }
    return [
        f"{SUMMARY_FILE} says {said} {what}, {there} are recorded"
        for what, (said, there) in counted.items()
        if said is not None and said != there
    ]


def _unknown_versions(census: RolloutCensus, swaps: list[dict[str, Any]]) -> list[str]:
    """Versions that generators have stamped, but were never sent. A generator that died may have stamped a version
    without acknowledging it; versions before the first that is recorded may have been loaded from disk."""
    events = ("committed", "failed")
    sent = {(str(swap["generator"]), int(swap["version"])) for swap in swaps if swap["event"] in events}
    first = min((version for _, version in sent), default=None)
    if first is None:
        return []
    strange = sorted((name, version) for name, version in census.stamped - sent if version >= first)
    return [f"{name} tagged tokens with version {version}, which it never acknowledged" for name, version in strange]


def _names(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return f"{', '.join(known[:NAMED])}{more}:"
