"""What an audit found, as a record, as text and as a verdict."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from inflight.audit.evidence import Excess, Share, Slope, Verdict


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The token with the largest difference."""

    rollout_id: str
    index: int
    """Among the sampled tokens."""
    recorded: float
    replayed: float


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens sampled under one version; `version` is None for all of them. Differences are absolute, in nats."""

    version: int | None
    tokens: int
    p50: float
    p99: float
    p999: float
    max: float
    worst: Worst
    excess: Excess | None = None
    """Against the first version's tokens."""
    same: Share | None = None
    """When the replay's kernels are the engine's."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """How an alternative did."""

    name: str
    says: str
    overall: Slope
    by_version: dict[int, Slope]
    """Slopes over the tokens sampled under each version."""

    @property
    def better(self) -> list[int]:
        """Versions whose tokens it explains better than the tags do."""
        return [version for version, slope in self.by_version.items() if slope.verdict is Verdict.ALTERNATIVE]


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an audit can say about a run."""

    run: str
    dtype: str
    tolerance: float | None
    """Largest difference allowed; None when only the statistics decide."""
    rollouts: int
    """Replayed in full."""
    swaps: int
    """Changes of version in the middle of a sequence, over all replayed rollouts."""
    straddling_tokens: int
    """Tokens of sequences with two or more versions."""
    mixed_kv_tokens: int
    """Tokens sampled on KV of which some is of another version than theirs."""
    total: VersionRow | None
    """None when nothing could be replayed."""
    versions: list[VersionRow]
    first: Share | None = None
    """Alike among the first tokens of sequences, which tell of the KV of their prompts; with the engine's kernels."""
    stories: list[Story]
    same: list[tuple[int, int]]
    """Versions whose weights are bit for bit those of the one before: tags of the two can't be told apart."""
    contradictions: dict[str, str]
    """Rollout → what its tags say against themselves."""
    missing: dict[int, int]
    """Version → tokens that could not be replayed because its weights were not kept."""
    unchecked: dict[str, int]
    """Other tokens that were not replayed, by reason."""
    torn_tail: str | None
    """What the rollout file ends with, if not with a whole group."""

    @property
    def faults(self) -> list[str]:
        """Why the run fails the audit, a line each; empty when every tag that was checked is right."""
        found = [f"{rollout}: {why}" for rollout, why in list(self.contradictions.items())[:5]]
        if len(self.contradictions) > 5:
            found.append(f"{len(self.contradictions) - 5} more rollouts whose tags contradict themselves")
        if self.total is None:
            found.append("no token could be replayed")
        elif self.tolerance is not None and not self.total.max <= self.tolerance:
            at = self.total.worst
            found.append(
                f"difference of {self.total.max:.3g} above {self.tolerance:g} at token {at.index} of {at.rollout_id}"
            )
        for version, tokens in self.missing.items():
            found.append(f"version {version} was not kept: {tokens} tokens depend on it")
        for story in self.stories:
            where = [f"version {version}" for version in story.better]
            if story.overall.verdict is Verdict.ALTERNATIVE:
                where.insert(0, "the whole run")
            if where:
                found.append(f"{story.says}: fits better than the tags for {', '.join(where)}")
        if self.tolerance is None:
            found += [
                f"version {each.version}: differences are {each.excess.ratio:.2g} times those of the first version"
                for each in self.versions
                if each.excess is not None and each.excess.suspicious
            ]
        if self.first is not None and self.first.suspicious:
            share = f"only {self.first.share:.0%} of the first tokens of sequences come out alike"
            found.append(f"{share}: their prompts had other KV than tagged")
        for each in self.versions if self.total is None else [self.total, *self.versions]:
            if each.same is not None and each.same.suspicious:
                what = "the whole run" if each.version is None else f"version {each.version}"
                found.append(f"{what}: only {each.same.share:.0%} of the tokens come out alike in the same kernels")
        return found

    @property
    def passed(self) -> bool:
        """Whether there is no fault."""
        return not self.faults


def read(data: bytes) -> AuditReport:
    """What audit.json holds. JSON has no infinity: a number that is null was infinite."""
    return msgspec.convert(_infinities(msgspec.json.decode(data)), AuditReport, str_keys=True)


def _infinities(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _infinities(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_infinities(each) for each in value]
    return math.inf if value is None and key in ("error", "p50", "p99", "p999", "max", "ratio") else value


def row(
    version: int | None, names: list[str], rollout: np.ndarray, index: np.ndarray, recorded: np.ndarray,
    replayed: np.ndarray, excess: Excess | None = None, same: Share | None = None,
) -> VersionRow:  # fmt: skip
    """The row of some tokens: `rollout` [N] counts into `names`; a difference that is no number counts as infinite."""
    size = np.nan_to_num(np.abs(recorded - replayed), nan=np.inf)
    at = int(size.argmax())
    p50, p99, p999 = np.quantile(size, (0.5, 0.99, 0.999), method="higher")
    return VersionRow(
        version=version, tokens=len(size), p50=float(p50), p99=float(p99), p999=float(p999), max=float(size[at]),
        worst=Worst(
            rollout_id=names[rollout[at]], index=int(index[at]),
            recorded=float(recorded[at]), replayed=float(replayed[at]),
        ),
        excess=excess, same=same,
    )  # fmt: skip


def text(report: AuditReport) -> str:
    """For a person."""
    same = "" if report.total is None or report.total.same is None else f" {'alike':>6}"
    lines = [f"{'version':>9} {'tokens':>8} {'p50':>9} {'p99':>9} {'p99.9':>9} {'max':>9}{same}  worst token"]
    lines += [_row_text(each) for each in report.versions]
    if report.total is not None:
        lines.append(_row_text(report.total))
        tokens = report.total.tokens
        lines.append(
            f"{tokens} tokens of {report.rollouts} rollouts replayed in {report.dtype}; {report.swaps} swaps in the "
            f"middle of sequences; {report.straddling_tokens / tokens:.0%} of the tokens are of such sequences, "
            f"{report.mixed_kv_tokens / tokens:.0%} read KV of an older version"
        )
    if report.first is not None:
        lines.append(f"{report.first.share:.1%} of the first tokens of sequences come out alike")
    if report.same:
        pairs = ", ".join(f"{older} and {newer}" for older, newer in report.same)
        lines.append(f"the same weights, so that their tags can't be told apart: {pairs}")
    for reason, count in sorted(report.unchecked.items()):
        lines.append(f"not checked: {count} tokens, {reason}")
    if report.torn_tail:
        lines.append(f"the rollout file's tail is torn: {report.torn_tail}")
    if report.stories:
        lines.append("is another story true? (slope 0: the tags are right, 1: the story is)")
        lines += [_story_text(story) for story in report.stories]
    lines += [f"FAULT  {fault}" for fault in report.faults]
    lines.append("failed" if report.faults else "passed: every tag that was checked is right")
    return "\n".join(lines)


def _row_text(row: VersionRow) -> str:
    name = "all" if row.version is None else str(row.version)
    figures = " ".join(f"{value:9.2e}" for value in (row.p50, row.p99, row.p999, row.max))
    same = "" if row.same is None else f" {row.same.share:6.1%}"
    return f"{name:>9} {row.tokens:>8} {figures}{same}  {row.worst.rollout_id} [{row.worst.index}]"


def _story_text(story: Story) -> str:
    slope = story.overall
    figures = f"{slope.slope:+.3f} ± {slope.error:.3f}" if np.isfinite(slope.error) else "no evidence"
    decided = sum(each.verdict is Verdict.TAGS for each in story.by_version.values())
    return (
        f"  {story.name:<8} {story.says}: {figures} over {slope.tokens} tokens, {slope.verdict}; "
        f"ruled out for {decided} of {len(story.by_version)} versions by themselves"
    )
