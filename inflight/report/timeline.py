"""When what happened in a run: its records as spans on tracks, on the clock of time.time.

Each process notes Unix time for moments and the monotonic clock for durations. On one host all read the same two
clocks, so that spans of different processes can be compared; both are only as far apart as the system's time is
corrected during the run. What an actor on another host has noted is moved by the offset that was measured (clocks.py);
all other moments are noted by the trainer.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.clocks import Clocks
from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, read_lines
from inflight.report.html import series
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.frames import StreamError
from inflight.rollout.stream import Reader, recorded
from inflight.types import Rollout


@dataclass(frozen=True)
class TimeSpan:
    """Something that took time: on a track of a process, from `start` on, in seconds of Unix time."""

    process: str
    track: str
    name: str
    start: float
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Timeline:
    """The spans of a run, and what could not be placed."""

    events: list[TimeSpan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, run_dir: Path, most: int) -> Timeline:
        """Of a run folder, with the last `most` sequences. Raises ValueError for a damaged file of lines; of a damaged
        rollout file, what is before the damage is used."""
        found = cls()
        steps = read_lines(run_dir / METRICS_FILE)
        if undated := sum("time" not in line for line in steps):
            found.notes.append(f"{undated} steps are left out: their time was not recorded, by an older release")
        for line in steps:
            found.events += _step(line)
        for line in read_lines(run_dir / SWAPS_FILE):
            found.events += _swap(line)
        for line in read_lines(run_dir / EVAL_FILE):
            found.events += _evaluation(line)
        found._sequences(run_dir / ROLLOUTS_FILE, most, Clocks(run_dir))
        return found

    def _sequences(self, path: Path, most: int, clocks: Clocks) -> None:
        last: deque[Rollout] = deque(maxlen=most)
        total = 0
        try:
            for group in Reader(path) if recorded(path) else ():
                last.extend(group.rollouts)
                total += len(group.rollouts)
        except StreamError as error:
            self.notes.append(str(error))
        if total > most:
            self.notes.append(f"the last {most} of {total} sequences are shown (--sequences)")
        for rollout in last:
            self.events += _sequence(rollout, clocks)
        self.notes += clocks.notes()

    def chrome(self) -> list[dict[str, Any]]:
        """As Chrome's trace event format has them: complete events in microseconds; spans of a track that overlap get
        lines of their own."""
        processes = {name: number for number, name in enumerate(sorted({each.process for each in self.events}), 1)}
        by_track: defaultdict[tuple[str, str], list[TimeSpan]] = defaultdict(list)
        for each in self.events:
            by_track[each.process, each.track].append(each)
        written: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
            for name, number in processes.items()
        ]
        thread = 0
        for (process, track), spans in sorted(by_track.items()):
            pid = processes[process]
            lines = _lines(spans)
            names = [f"{track} {at}" if len(lines) > 1 else track for at in range(1, len(lines) + 1)]
            for name, line in zip(names, lines, strict=True):
                thread += 1
                written.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}})
                written += [_complete(each, pid, thread) for each in line]
        return written


def _lines(spans: Iterable[TimeSpan]) -> list[list[TimeSpan]]:
    """Spans in as few lines as possible without an overlap in any; each in order of time."""
    lines: list[list[TimeSpan]] = []
    free: list[tuple[float, int]] = []
    for each in sorted(spans, key=lambda span: span.start):
        if free and free[0][0] <= each.start:
            _, at = heapq.heappop(free)
        else:
            at = len(lines)
            lines.append([])
        lines[at].append(each)
        heapq.heappush(free, (each.start + each.seconds, at))
    return lines


def _complete(span: TimeSpan, pid: int, tid: int) -> dict[str, Any]:
    figures = {name: value for name, value in span.figures.items() if _is_json(value)}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "pid": pid,
        "tid": tid,
        "ts": round(span.start * 1e6),
        "dur": max(round(span.seconds * 1e6), 1),
        "args": figures,
    }


def _is_json(value: object) -> bool:
    """Whether JSON has it: NaN and infinities would make the whole file unreadable."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _seconds(line: Mapping[str, Any], name: str) -> float:
    return max(float(series.number(line.get(name)) or 0.0), 0.0)


def _step(line: Mapping[str, Any]) -> list[TimeSpan]:
    """The line is written at the end of the step: wait, train, publish (wait for the version before, pack)."""
    end = _seconds(line, "time")
    step = line.get("step")
    if not end:
        return []
    publish = _seconds(line, "publish_wait_s") + _seconds(line, "pack_s")
    train = _seconds(line, "train_s")
    wait = _seconds(line, "wait_s")
    shown = {name: line.get(name) for name in ("reward", "loss", "lag_mean", "tokens_trained", "guard_s")}
    begin = end - publish - train - wait
    return [
        TimeSpan("trainer", "steps", f"wait for step {step}", begin, wait),
        TimeSpan("trainer", "steps", f"train {step}", begin + wait, train, shown),
        TimeSpan("trainer", "steps", f"publish {step}", end - publish, publish, {"pack_s": line.get("pack_s")}),
    ]


def _swap(line: Mapping[str, Any]) -> list[TimeSpan]:
    heard = _seconds(line, "time")
    version = line.get("version")
    process = str(line.get("generator"))
    if not heard:
        return []
    if line.get("event") != "committed":
        figures = {"reason": line.get("reason"), "phase": line.get("phase")}
        return [TimeSpan(process, "weights", f"version {version} {line.get('event')}", heard, 0.0, figures)]
    commit = _seconds(line, "commit_s")
    gap = _seconds(line, "gap_s")
    ready = heard - commit - _seconds(line, "pinned_s")
    sent = _seconds(line, "ready_s")
    names = ("transfer_s", "build_s", "ready_s", "commit_s", "gap_s", "pinned_s", "running")
    figures = {name: line.get(name) for name in names}
    return [
        TimeSpan(process, "weights", f"transfer {version}", ready - sent, sent, figures),
        TimeSpan(process, "weights", f"commit {version}", heard - commit, commit),
        TimeSpan(process, "swaps", f"swap to {version}", heard - gap, gap, {"running": line.get("running")}),
    ]


def _evaluation(line: Mapping[str, Any]) -> list[TimeSpan]:
    took = _seconds(line, "eval/seconds")
    if "time" not in line or not took:
        return []
    figures = {name: line.get(name) for name in ("eval/reward", "eval/questions", "generator")}
    start = _seconds(line, "time") - took
    return [TimeSpan("evaluator", "evaluations", f"evaluate {line.get('version')}", start, took, figures)]


def _sequence(rollout: Rollout, clocks: Clocks) -> list[TimeSpan]:
    if not (math.isfinite(rollout.started) and math.isfinite(rollout.finished)):
        return []
    spans = [f"{span.version} from token {span.start}" for span in rollout.turn.token_versions]
    figures = {
        "tokens": len(rollout.turn.token_ids),
        "versions": ", ".join(spans),
        "first_token_s": rollout.first_token_s,
        "reward": rollout.reward if math.isfinite(rollout.reward) else None,
        "finish": rollout.turn.finish_reason,
    }
    took = max(rollout.finished - rollout.started, 0.0)
    started = clocks.aligned(rollout.actor, rollout.started)
    found = [TimeSpan(rollout.generator, "sequences", rollout.rollout_id, started, took, figures)]
    if rollout.score_s > 0:
        text = f"score {rollout.rollout_id}"
        found.append(TimeSpan(rollout.actor or "actors", "rewards", text, started + took, rollout.score_s, figures))
    return found
