"""An audit's report as text."""

from __future__ import annotations

import numpy as np

from inflight.agreement import Agreement
from inflight.audit.evidence import Verdict
from inflight.audit.report import AuditOutcome, AuditReport, Hypothesis
from inflight.audit.rows import VersionRow


def text(report: AuditReport) -> str:
    """The report for a person."""
    same = "" if report.total is None or report.total.same is None else f" {'alike':>6}"
    lines = [f"{'version':>9} {'tokens':>8} {'p50':>9} {'p99':>9} {'p99.9':>9} {'max':>9}{same}  worst token"]
    lines += [_row_text(each) for each in report.versions]
    if report.total is not None:
        lines.append(_row_text(report.total))
        tokens = report.total.tokens
        lines.append(
            f"{tokens} tokens of {report.rollouts} rollouts replayed in {report.dtype}; {report.swaps} times a swap "
            f"fell into a sequence (one swap may fall into several); {report.straddling_tokens / tokens:.0%} of the "
            f"tokens are of such sequences, {report.mixed_kv_tokens / tokens:.0%} read KV of an older version"
        )
        lines.append(_agreement_text(report.agreement))
    if report.first is not None:
        lines.append(f"{report.first.share:.1%} of the first tokens of sequences come out alike")
    if report.unalike is not None and report.unalike.alone:
        lines.append(f"{report.unalike.alone} rollouts come out alike if they were alone in some steps")
    if report.continued:
        lines.append(
            f"not checked: {report.continued} tokens of rollouts that lost a generator, and their KV's versions"
        )
    if report.same:
        pairs = ", ".join(f"{older} and {newer}" for older, newer in report.same)
        lines.append(f"the same weights, so that their tags can't be distinguished: {pairs}")
    if report.hypotheses:
        lines.append("does a fault explain the record better? (slope 0: the tags are right, 1: that fault happened)")
        lines += [_hypothesis_text(hypothesis) for hypothesis in report.hypotheses]
    lines += [f"FAULT  {fault}" for fault in report.faults]
    lines += [f"OPEN   {reason}" for reason in report.open]
    lines.append(_last(report))
    return "\n".join(lines)


_MEANING = {
    AuditOutcome.PASSED: ": every tag that was checked is right",
    AuditOutcome.FAILED: "",
    AuditOutcome.NOT_SHOWN: ": no fault was found, but it is not shown that there is none",
}


def _last(report: AuditReport) -> str:
    drawn = "" if report.drawn_from is None else f", for {report.rollouts} of {report.drawn_from} rollouts (--limit)"
    return f"{report.outcome}{drawn}{_MEANING[report.outcome]}"


def _agreement_text(agreement: Agreement) -> str:
    return (
        f"recorded over replayed: slope {agreement.slope:.4f}, correlation {agreement.correlation:.5f}, "
        f"mean difference {agreement.mean:+.1e}; the median difference is {agreement.steps:.2g} roundings, "
        f"the largest {agreement.steps_max:.3g}"
    )


def _row_text(row: VersionRow) -> str:
    name = "all" if row.version is None else str(row.version)
    figures = " ".join(f"{value:9.2e}" for value in (row.p50, row.p99, row.p999, row.max))
    same = "" if row.same is None else f" {row.same.share:6.1%}"
    return f"{name:>9} {row.tokens:>8} {figures}{same}  {row.worst.rollout_id} [{row.worst.index}]"


def _hypothesis_text(hypothesis: Hypothesis) -> str:
    slope = hypothesis.overall
    figures = f"{slope.slope:+.3f} ± {slope.error:.3f}" if np.isfinite(slope.error) else "no evidence"
    decided = sum(each.verdict is Verdict.TAGS for each in hypothesis.by_version.values())
    return (
        f"  {hypothesis.name:<8} {hypothesis.says}: {figures} over {slope.tokens} tokens, {slope.verdict}; "
        f"ruled out for {decided} of {len(hypothesis.by_version)} versions by themselves"
    )
