"""A summary as text: the table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping

from inflight.report import staleness
from inflight.report.summary import EDGE_STEPS, Spread, Summary


def table(summary: Summary) -> str:
    """The summary as text, one figure per line, and the figures by lag below; empty for a run without a step that has
    lost no group either."""
    rows = labelled(summary)
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, *filter(None, [staleness.table(summary.by_lag, "lag")])])


def labelled(summary: Summary) -> list[tuple[str, str]]:
    """Label and text of each figure, apart from those by lag; without a step, of the groups that were lost alone."""
    if not summary.steps:
        return _lost(summary)
    lag = " ".join(f"{lag}:{count}" for lag, count in sorted(summary.lag.items()))
    swaps = (
        f"{summary.swaps}, {summary.swaps_while_running} of them while sequences ran, "
        f"{summary.swaps_failed} failed, {summary.swaps_superseded} superseded"
    )
    judged = f"{summary.tokens_trained} tokens trained, {summary.tokens_masked} masked"
    rows = [
        ("steps", f"{summary.steps} in {_text(summary.seconds, 's')}, version {summary.version}"),
        ("reward", _reward(summary)),
        *_of_all(summary),
        *_learned(summary),
        ("swaps", swaps),
        ("gap of a swap", _spread_text(summary.gap_ms)),
        ("trainer delayed", f"{_spread_text(summary.publish_wait_ms)} per publish"),
        *_recorded(summary),
        ("gate", f"{judged}, groups dropped: {_counts(summary.groups_dropped)}"),
        ("lag of tokens", lag or "–"),
    ]
    if summary.rollouts_dropped:
        rows.append(("left out", f"of groups: {_counts(summary.rollouts_dropped)}"))
    if summary.torn_tail:
        rows.append(("rollout file", summary.torn_tail))
    return rows


def _lost(summary: Summary) -> list[tuple[str, str]]:
    """What may have kept a run from its first step: other figures have no value yet."""
    lost = {"failed": summary.groups_failed, "dropped": summary.groups_dropped}
    rows = [(f"groups {what}", _counts(counts)) for what, counts in lost.items() if counts]
    return [*rows, *([("rollout file", summary.torn_tail)] if summary.torn_tail else [])]


def _reward(summary: Summary) -> str:
    """The first steps compared with the last ones, where these are others."""
    last = _text(summary.reward_last)
    if summary.steps < 2 * EDGE_STEPS:
        return f"{last} (last {_edge(summary)})"
    return f"{_text(summary.reward_first)} (first {EDGE_STEPS} steps) to {last} (last {EDGE_STEPS})"


def _edge(summary: Summary) -> str:
    steps = min(EDGE_STEPS, summary.steps)
    return f"{steps} steps" if steps > 1 else "step"


def _of_all(summary: Summary) -> list[tuple[str, str]]:
    """Rewards of all groups: if the gate dropped some, the reward of those trained on is not the success rate."""
    first = summary.reward_all_first
    last = summary.reward_all_last
    if (first, last) in ((None, None), (summary.reward_first, summary.reward_last)):
        return []
    compared = f"{_text(first)} to " if summary.steps >= 2 * EDGE_STEPS else ""
    return [("of all groups", f"{compared}{_text(last)}, including those that the gate dropped")]


def _learned(summary: Summary) -> list[tuple[str, str]]:
    """Each named reward, and the evaluations, where the run has them."""
    rows = []
    if summary.rewards_last:
        each = ", ".join(f"{name} {_text(value)}" for name, value in summary.rewards_last.items())
        rows.append(("each reward", f"{each} (last {_edge(summary)}, without its weight)"))
    if summary.held_out is not None:
        rows.append(("held-out", str(summary.held_out)))
    return rows


def _recorded(summary: Summary) -> list[tuple[str, str]]:
    failed = f"groups failed: {_counts(summary.groups_failed)}"
    if summary.rollouts is None:
        return [("rollouts", f"none recorded, {failed}")]
    share = f"{(summary.mixed_rollouts or 0) / summary.rollouts:.0%}" if summary.rollouts else "–"
    return [
        ("rollouts", f"{summary.rollouts}, {summary.aborted} aborted, {summary.retried} retried, {failed}"),
        ("versions", f"{share} of the rollouts hold 2 or more, at most {summary.max_versions}"),
        ("tokens", f"{summary.tokens} sampled, {_text(summary.tokens_per_s)} per second"),
    ]


def _text(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:.3g}{' ' + unit if unit else ''}"


def _spread_text(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.median:.3g} ms median, {spread.max:.3g} ms at most"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "none"
