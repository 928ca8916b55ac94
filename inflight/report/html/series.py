"""What a run's metrics say over its steps and swaps, as columns of bounded length."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inflight.metrics import EVAL_GIVEN_UP, counts_of

MOST_POINTS = 2000
"""Of a curve: more than a screen has columns. A longer run is thinned evenly, with its first and last step."""
_FIGURES = (
    "reward",
    "reward_all",
    "loss",
    "grad_norm",
    "lag_mean",
    "lag_max",
    "tokens_per_s",
    "wait_s",
    "train_s",
    "publish_wait_s",
    "pack_s",
    "guard_s",
    "buffer",
    "groups_in_flight",
    "tokens_trained",
    "tokens_masked",
    "entropy",
    "kl",
    "ess",
    "log_ratio_mean",
)
_SWAP_FIGURES = ("gap_s", "transfer_s", "ready_s", "commit_s", "running")


def thinned(count: int, most: int = MOST_POINTS) -> list[int]:
    """At most `most` of the indices below `count`, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def number(value: Any) -> float | int | None:
    """A finite number as it is; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def of_steps(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Column → its value at each step that is shown; `tokens` are those of all batches up to the step."""
    tokens = 0.0
    totals = []
    for line in lines:
        tokens += (number(line.get("tokens_trained")) or 0) + (number(line.get("tokens_masked")) or 0)
        totals.append(tokens)
    shown = thinned(len(lines))
    columns: dict[str, list[Any]] = {
        "step": [number(lines[at].get("step")) for at in shown],
        "time": [number(lines[at].get("time_s")) for at in shown],
        "tokens": [totals[at] for at in shown],
    }
    for name in _FIGURES:
        column = [number(lines[at].get(name)) for at in shown]
        if any(value is not None for value in column):
            columns[name] = column
    return columns


def of_swaps(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Committed versions as columns, and the other outcomes of versions, counted by reason."""
    done = [line for line in lines if line.get("event") == "committed"]
    shown = [done[at] for at in thinned(len(done))]
    columns: dict[str, list[Any]] = {name: [number(line.get(name)) for line in shown] for name in _SWAP_FIGURES}
    columns["version"] = [number(line.get("version")) for line in shown]
    columns["time"] = [number(line.get("time")) for line in shown]
    columns["generator"] = [str(line.get("generator")) for line in shown]
    others = Counter(
        (str(line.get("event")), str(line.get("generator")), str(line.get("reason")))
        for line in lines
        if line.get("event") != "committed"
    )
    rows = [[*key, count] for key, count in others.most_common(50)]
    return {"committed": columns, "total": len(done), "others": rows}


def of_evaluations(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Evaluations with a result as columns, and the reasons of those without."""
    done = [line for line in lines if number(line.get("eval/reward")) is not None]
    shown = [done[at] for at in thinned(len(done))]
    columns: dict[str, list[Any]] = {
        name: [number(line.get(f"eval/{name}")) for line in shown]
        for name in (
            "reward",
            "reward_stderr",
            "questions",
            "answers",
            "mixed",
            "failed",
            "tokens",
            "truncated",
            "seconds",
        )
    }
    columns["version"] = [number(line.get("version")) for line in shown]
    columns["best"] = [bool(line.get("eval/best")) for line in shown]
    columns["given_up"] = [str(line[EVAL_GIVEN_UP]) for line in lines if line.get(EVAL_GIVEN_UP)][:50]
    return columns


def durations(seconds: Sequence[float]) -> dict[str, float]:
    """Count, sum, median, 99th percentile and maximum; empty for none."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {
        "count": len(ordered),
        "sum": sum(ordered),
        "median": ordered[len(ordered) // 2],
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "most": ordered[-1],
    }


def lags(lines: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """[lag, tokens] over the run, ascending."""
    total: Counter[int] = Counter()
    for line in lines:
        total.update({int(lag): count for lag, count in counts_of(line, "lag_counts").items()})
    return [[lag, count] for lag, count in sorted(total.items())]


def masked(lines: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Tokens that were masked, by reason. Raises ValueError for a damaged line, as `lags` and `gate` do."""
    total: Counter[str] = Counter()
    for line in lines:
        for name in ("tokens_masked_by_rule", "tokens_masked_by_ratio"):
            total.update(counts_of(line, name))
    return total


def gate(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Counts by reason: groups and rollouts that were left out, tokens that were masked, groups that failed."""
    last = lines[-1] if lines else {}
    return {
        "groups dropped": counts_of(last, "groups_dropped"),
        "rollouts left out": counts_of(last, "rollouts_dropped"),
        "tokens masked": dict(masked(lines)),
        "groups failed": counts_of(last, "groups_failed"),
    }


def waits(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of the trainer by what it did, over all steps."""
    total: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        guard = number(line.get("guard_s")) or 0.0
        total["wait for rollouts"] += number(line.get("wait_s")) or 0.0
        total["train"] += max((number(line.get("train_s")) or 0.0) - guard, 0.0)
        total["wait for the version before"] += number(line.get("publish_wait_s")) or 0.0
        total["pack the weights"] += (number(line.get("pack_s")) or 0.0) + guard
    return dict(total)
