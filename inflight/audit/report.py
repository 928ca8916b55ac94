"""The result of an audit, as a record, and its outcome."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from inflight.agreement import Agreement
from inflight.audit.evidence import MIN_PROMPTS, Share, Slope, Verdict
from inflight.audit.rows import VersionRow, Worst

MOST_CONTINUED = 0.1
"""Share of the tokens above which those that can't be replayed, since generators were lost, leave the result open."""


class AuditOutcome(StrEnum):
    """The outcome of an audit."""

    PASSED = "passed"
    """Every tag that was checked is right."""
    FAILED = "failed"
    """Something is wrong; `faults` says what."""
    NOT_SHOWN = "not shown"
    """No fault was found, but it is not shown that there is none; `open` says why."""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """The result for an alternative."""

    name: str
    says: str
    overall: Slope
    by_version: dict[int, Slope]
    """Slopes over the tokens sampled under each version."""

    @property
    def better(self) -> list[int]:
        """Versions whose tokens it explains better than the tags do."""
        return [version for version, slope in self.by_version.items() if slope.verdict is Verdict.ALTERNATIVE]


class Unalike(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that do not come out bit for bit in the engine's own kernels when every sequence has company."""

    wrong: int
    """Number that no pass explains."""
    alone: int
    """Number that come out bit for bit if they were alone in some steps (audit/alone.py)."""
    unknown: int
    """Number not retraced because there were too many, while all retraced ones had been alone."""


class Completeness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the record holds what the run says (audit/counts.py)."""

    wrong: list[str] = []
    """What contradicts the run's own counts."""
    unknown: list[str] = []
    """Why it is unknown whether it is complete."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results of an audit."""

    run: str
    dtype: str
    """Dtype of the replay's computation."""
    recorded_in: str
    """Dtype of the engine's computation."""
    exact: bool
    """Whether single tokens can be judged: both are float32, or the kernels are the engine's."""
    tolerance: float | None
    """Largest difference allowed; None when the dtype's rounding decides."""
    hidden: str | None = None
    """With a tolerance: the differences within it that rounding does not explain."""
    rollouts: int
    """Number of rollouts that were replayed in full."""
    drawn_from: int | None = None
    """Number of rollouts in the record when only some of them were drawn for the replay (`--limit`); else None."""
    prompts: int
    """Number of their prompts."""
    swaps: int
    """How often a swap fell into a sequence, over all replayed rollouts: one swap may fall into several."""
    straddling_tokens: int
    """Tokens of sequences with two or more versions."""
    mixed_kv_tokens: int
    """Tokens sampled on KV of which some is of another version than theirs."""
    agreement: Agreement
    """Of all recorded with all replayed values."""
    worst: Worst | None
    """The token with the largest difference in rounding steps."""
    total: VersionRow | None
    """None when nothing could be replayed."""
    versions: list[VersionRow]
    first: Share | None = None
    """Share of first tokens of sequences that come out alike, which reflects the KV of prompts; with the engine's
    kernels."""
    unalike: Unalike | None = None
    """Set with the engine's kernels."""
    hypotheses: list[Hypothesis]
    same: list[tuple[int, int]]
    """Versions whose weights are bit-identical to those of the one before: their tags can't be distinguished."""
    contradictions: dict[str, str]
    """Rollout → the contradiction in its tags."""
    missing: dict[int, int]
    """Version → tokens that could not be replayed because its weights were not kept."""
    unchecked: dict[str, int]
    """Other tokens that were not replayed, by reason."""
    continued: int = 0
    """Tokens of rollouts that lost a generator, and with it the versions of their KV; the run records that it did."""
    complete: Completeness

    @property
    def faults(self) -> list[str]:
        """Why the run fails the audit, one line each; empty when no fault was found."""
        found = [*self.complete.wrong, *self._contradictory(), *self._disagreeing(), *self._unalike()]
        for version, tokens in self.missing.items():
            found.append(f"version {version} was not kept: {tokens} tokens depend on it")
        for hypothesis in self.hypotheses:
            where = [f"version {version}" for version in hypothesis.better]
            if hypothesis.overall.verdict is Verdict.ALTERNATIVE:
                where.insert(0, "the whole run")
            if where:
                found.append(f"{hypothesis.says}: fits better than the tags for {', '.join(where)}")
        return found + [
            f"version {each.version}: differences are {each.excess.ratio:.2g} times those of the first version"
            for each in self.versions
            if each.excess is not None and each.excess.suspicious
        ]

    @property
    def open(self) -> list[str]:
        """Why it is not shown that all is right, one line each, apart from faults."""
        found = list(self.complete.unknown)
        if self.hidden is not None:
            found.append(f"a wrong token may be within --tolerance {self.tolerance:g}: {self.hidden}")
        if not self.exact:
            found.append(
                f"single tokens can't be judged in {self.recorded_in}, which rounds: the differences are "
                f"{self.agreement.median:.2g} nats at the median, {self.agreement.largest:.2g} at most"
            )
            if self.prompts < MIN_PROMPTS:
                found.append(f"{self.prompts} prompts are too few to tell versions by, {MIN_PROMPTS} are needed")
            undecided = [
                hypothesis.name for hypothesis in self.hypotheses if hypothesis.overall.verdict is Verdict.UNDECIDED
            ]
            if undecided:
                found.append(f"undecided for the whole run: {', '.join(undecided)}")
        if self.unalike is not None and self.unalike.unknown:
            found.append(f"{self.unalike.unknown} rollouts do not come out alike and were not retraced")
        replayed = 0 if self.total is None else self.total.tokens
        if self.continued > MOST_CONTINUED * replayed:
            found.append(f"{self.continued} tokens could not be checked, their generators were lost; {replayed} were")
        found += [f"{count} tokens were not checked, {reason}" for reason, count in sorted(self.unchecked.items())]
        return found

    @property
    def outcome(self) -> AuditOutcome:
        """Passed only if there is no fault and nothing open."""
        if self.faults:
            return AuditOutcome.FAILED
        return AuditOutcome.NOT_SHOWN if self.open else AuditOutcome.PASSED

    @property
    def passed(self) -> bool:
        """Whether all that was checked is shown to be right."""
        return self.outcome is AuditOutcome.PASSED

    def _contradictory(self) -> list[str]:
        found = [f"{rollout}: {why}" for rollout, why in list(self.contradictions.items())[:5]]
        if len(self.contradictions) > 5:
            found.append(f"{len(self.contradictions) - 5} more rollouts whose tags contradict themselves")
        return found

    def _disagreeing(self) -> list[str]:
        """Faults in the size of differences."""
        if self.total is None:
            return ["no token could be replayed"]
        found = list(self.agreement.problems)
        if found and self.worst is not None:
            where = f"token {self.worst.index} of {self.worst.rollout_id}"
            values = f"{self.worst.recorded:.4g} recorded, {self.worst.replayed:.4g} replayed"
            found.append(f"recorded and replayed log-probabilities don't agree, least at {where}: {values}")
        return found + [
            f"version {each.version}: {problem}"
            for each in self.versions
            if each.agreement is not None and not self.agreement.problems
            for problem in each.agreement.problems
        ]

    def _unalike(self) -> list[str]:
        """What no pass through the engine's kernels explains."""
        if self.unalike is None or not self.unalike.wrong or self.total is None:
            return []
        at = self.total.worst
        found = [
            f"{self.unalike.wrong} of {self.rollouts} rollouts do not come out alike in the same kernels, the largest "
            f"difference is {self.total.max:.3g} nats at token {at.index} of {at.rollout_id}"
        ]
        if self.first is not None and self.first.suspicious:
            share = f"only {self.first.share:.0%} of the first tokens of sequences come out alike"
            found.append(f"{share}: their prompts had other KV than tagged")
        for each in [self.total, *self.versions]:
            if each.same is not None and each.same.suspicious:
                what = "the whole run" if each.version is None else f"version {each.version}"
                found.append(f"{what}: only {each.same.share:.0%} of the tokens come out alike in the same kernels")
        return found


def read(data: bytes) -> AuditReport:
    """The report in audit.json. JSON has no infinity: a null number was infinite."""
    return msgspec.convert(_infinities(msgspec.json.decode(data)), AuditReport, str_keys=True)


_NUMBERS = (
    "error",
    "p50",
    "p99",
    "p999",
    "max",
    "ratio",
    "median",
    "largest",
    "steps",
    "steps_max",
    "mean",
    "slope",
    "correlation",
)


def _infinities(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _infinities(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_infinities(each) for each in value]
    return math.inf if value is None and key in _NUMBERS else value
