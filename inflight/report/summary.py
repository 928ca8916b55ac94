"""The results of a run, computed from its folder alone: the figures of summary.json.

It reads metrics.jsonl (one line per step), swaps.jsonl (one line per version and generator), eval.jsonl (one line per
evaluation) and the rollout stream.
"""

from __future__ import annotations

import collections
import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import release
from inflight.error_line import with_kind
from inflight.metrics import EVAL_FILE, METRICS_FILE, SUMMARY_FILE, SWAPS_FILE, counts_of, read_lines
from inflight.report import starts
from inflight.report.held_out import HeldOutReward, held_out
from inflight.report.staleness import Row, by_lag
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader, recorded
from inflight.types import Rollout

EDGE_STEPS = 5
"""Number of steps over which the first and the last reward are averaged."""
_RECORDED = ("rollouts", "aborted", "retried", "tokens", "mixed_rollouts", "max_versions")
"""Figures that need the rollout stream."""
COUNTED = {"groups_failed": "failed/", "groups_dropped": "dropped/", "rollouts_dropped": "rollouts/"}
"""Figures that are counted from the run's beginning, by reason → their prefix in the trainer's status."""
_PUBLISHING = ("publish_wait_s", "pack_s", "guard_s")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and maximum of a measured quantity."""

    median: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One finished (or interrupted) run. A figure is None if nothing was measured."""

    steps: int
    seconds: float | None
    """From when the trainer began to wait for the first batch until it wrote the last step's line; of a run that was
    resumed, the sum over its starts."""
    version: int
    """The last published version."""
    swaps: int
    swaps_while_running: int
    """Swaps with at least one unfinished sequence in the engine."""
    swaps_failed: int
    swaps_superseded: int
    """Versions that were skipped at a generator, because a newer one existed before they could be sent."""
    gap_ms: Spread | None
    """Stall of the engine's step loop in a swap."""
    publish_wait_ms: Spread | None
    """Time that a publish costs the trainer: waiting for a free buffer, packing, and the optimizer's wait for it."""
    rollouts: int | None
    """This and all other figures of the rollout stream are None if it was not recorded (`rollout.keep=false`)."""
    aborted: int | None
    """Requests for these rollouts that an engine aborted and that were retried; included in `retried`."""
    retried: int | None
    """Requests for these rollouts that failed, for any reason, and were retried."""
    groups_failed: dict[str, int]
    """Started groups that were never delivered, by reason; without those cut off by the end of a run that has taken a
    step."""
    groups_dropped: dict[str, int]
    rollouts_dropped: dict[str, int] = {}
    """Rollouts that the gate excluded, by reason, including those of dropped groups."""
    tokens: int | None
    tokens_per_s: float | None
    """Over the time from the first submission to the last completion, less the time between the last step of a start
    and when the next start's trainer began to wait for a batch (or, if it has made no step, began to sample)."""
    tokens_trained: int
    tokens_masked: int
    mixed_rollouts: int | None
    """Sequences whose tokens were sampled by two or more versions."""
    max_versions: int | None
    """The most versions within one sequence."""
    lag: dict[int, int]
    """Number of tokens that the gate's rules accepted, by lag in versions; rules on log-ratios are not included."""
    reward_first: float | None
    reward_last: float | None
    """Mean reward of the groups that were trained on."""
    reward_all_first: float | None = None
    reward_all_last: float | None = None
    """Mean reward of all groups that finished; None for a run that did not report it."""
    rewards_last: dict[str, float] = {}
    """Mean of each named reward, without its weight, over the last steps."""
    held_out: HeldOutReward | None = None
    by_lag: list[Row]
    """Figures of the tokens by lag (staleness.py)."""
    torn_tail: str | None
    """The incomplete end of the rollout stream, if it has one."""


def summarize(run_dir: Path, counted: Mapping[str, Mapping[str, int]] | None = None) -> Summary:
    """Computes the summary. `counted`: name of a figure of COUNTED → counts by reason, for a run that has written no
    step; when omitted, those of the summary.json that its launcher has written.

    Raises ValueError that names the file when one of the run's files is damaged (except for a torn tail).
    """
    steps = read_lines(run_dir / METRICS_FILE)
    swaps = read_lines(run_dir / SWAPS_FILE)
    evaluations = read_lines(run_dir / EVAL_FILE)
    tally, torn = _tally(run_dir / ROLLOUTS_FILE, starts.without_a_step(run_dir, steps))
    if not steps:
        counted = counted_before(run_dir) if counted is None else counted
    with damage_named(run_dir):
        figures = _computed(steps, swaps, tally, torn, steps[-1] if steps else counted or {})
        return msgspec.structs.replace(figures, held_out=held_out(evaluations))


def counted_before(run_dir: Path) -> dict[str, dict[str, int]]:
    """What the launcher has counted at the run's end, as in `summarize`; empty where there is no summary."""
    try:
        before = read(run_dir)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {name: getattr(before, name) for name in COUNTED}


@contextlib.contextmanager
def damage_named(run_dir: Path) -> Iterator[None]:
    """Turns errors about a missing figure in a line, or one of a wrong type, into a ValueError that names the files."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        damage = f"a line of {METRICS_FILE}, {SWAPS_FILE} or {EVAL_FILE} is damaged: {with_kind(error)}"
        raise ValueError(f"{run_dir}: {damage}{release.remark(run_dir)}") from None


def _computed(
    steps: Sequence[dict[str, Any]],
    swaps: Sequence[dict[str, Any]],
    tally: _Tally | None,
    torn: str | None,
    counted: Mapping[str, Any],
) -> Summary:
    done = [swap for swap in swaps if swap["event"] == "committed"]
    last = steps[-1] if steps else {}
    rewards = _figures(steps, "reward")
    of_all = _figures(steps, "reward_all")
    return Summary(
        steps=len(steps),
        seconds=starts.seconds(steps),
        version=int(last.get("version", 0)),
        swaps=len(done),
        swaps_while_running=sum(bool(swap["running"]) for swap in done),
        swaps_failed=sum(swap["event"] == "failed" for swap in swaps),
        swaps_superseded=sum(swap["event"] == "superseded" for swap in swaps),
        gap_ms=_spread(1e3 * swap["gap_s"] for swap in done),
        publish_wait_ms=_spread(1e3 * sum(step.get(name, 0.0) for name in _PUBLISHING) for step in steps),
        groups_failed=counts_of(counted, "groups_failed"),
        groups_dropped=counts_of(counted, "groups_dropped"),
        rollouts_dropped=counts_of(counted, "rollouts_dropped"),
        tokens_trained=sum(int(step.get("tokens_trained", 0)) for step in steps),
        tokens_masked=sum(int(step.get("tokens_masked", 0)) for step in steps),
        lag=_lags(steps),
        reward_first=_mean(rewards[:EDGE_STEPS]),
        reward_last=_mean(rewards[-EDGE_STEPS:]),
        reward_all_first=_mean(of_all[:EDGE_STEPS]),
        reward_all_last=_mean(of_all[-EDGE_STEPS:]),
        rewards_last=_by_name(steps[-EDGE_STEPS:]),
        by_lag=by_lag(steps),
        torn_tail=torn,
        tokens_per_s=None if tally is None else tally.per_s(starts.paused_s(steps, tally.first_without_a_step)),
        **{name: getattr(tally, name, None) for name in _RECORDED},
    )


def write(run_dir: Path, summary: Summary) -> None:
    """Writes summary.json."""
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (run_dir / SUMMARY_FILE).write_bytes(text + b"\n")


def read(run_dir: Path) -> Summary:
    """Reads summary.json. Raises FileNotFoundError or msgspec.ValidationError."""
    return msgspec.json.decode((run_dir / SUMMARY_FILE).read_bytes(), type=Summary)


@dataclass
class _Tally:
    """Counts over the rollouts, which are read one by one: together they may not fit into memory."""

    rollouts: int = 0
    tokens: int = 0
    mixed_rollouts: int = 0
    max_versions: int = 0
    retries: collections.Counter[str] = field(default_factory=collections.Counter)
    first: float = math.inf
    last: float = -math.inf
    without_a_step_since: float = math.inf
    first_without_a_step: float = math.inf
    """The first submission of the last start, if that has made no step."""

    @property
    def aborted(self) -> int:
        return self.retries["aborted"]

    @property
    def retried(self) -> int:
        return self.retries.total()

    def per_s(self, paused_s: float) -> float | None:
        """Tokens per second from the first submission to the last completion, less `paused_s`."""
        took = self.last - self.first - paused_s
        return self.tokens / took if took > 0 else None

    def add(self, rollout: Rollout) -> None:
        versions = len({span.version for span in rollout.turn.token_versions})
        self.rollouts += 1
        self.tokens += len(rollout.turn.token_ids)
        self.mixed_rollouts += versions > 1
        self.max_versions = max(self.max_versions, versions)
        self.retries.update(rollout.retries)
        self.first = min(self.first, rollout.started)
        self.last = max(self.last, rollout.finished)
        if rollout.started >= self.without_a_step_since:
            self.first_without_a_step = min(self.first_without_a_step, rollout.started)


def _tally(path: Path, without_a_step_since: float) -> tuple[_Tally | None, str | None]:
    if not recorded(path):
        return None, None
    tally = _Tally(without_a_step_since=without_a_step_since)
    reader = Reader(path)
    for group in reader:
        for rollout in group.rollouts:
            tally.add(rollout)
    return tally, reader.torn


def _figures(steps: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [float(step[name]) for step in steps if step.get(name) is not None]


def _by_name(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    each = [step.get("rewards", {}) for step in steps]
    found = {name: _mean(_figures(each, name)) for name in sorted({name for values in each for name in values})}
    return {name: value for name, value in found.items() if value is not None}


def _lags(steps: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    total: collections.Counter[int] = collections.Counter()
    for step in steps:
        total.update({int(lag): count for lag, count in counts_of(step, "lag_counts").items()})
    return dict(sorted(total.items()))


def _spread(values: Iterable[float]) -> Spread | None:
    known = list(values)
    return Spread(median=statistics.median(known), max=max(known)) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
