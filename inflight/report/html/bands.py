"""The version bands: sampled sequences, token by token, with the versions that sampled them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.report.answers import ShownGroup, ShownRollout, Texts, Training, asked
from inflight.report.html.series import number
from inflight.rollout.frames import StreamError
from inflight.rollout.stream import FramePlace, Reader, read_group, recorded
from inflight.types import RolloutGroup

MOST_SEQUENCES = 400
MOST_TOKENS = 80_000
MOST_TOKENS_EACH = 4_000
"""Of one sequence; the rest of a longer one is cut off, and said so."""
MOST_TEXT = 2_500_000
"""Characters of all texts, as the file holds them: one that has to be escaped takes six."""
STRETCHES = 5
"""Of a long run, consecutive groups from so many places: sequences that ran at the same time share their swaps."""
MOST_PROMPT = 2_000


@dataclass
class GroupIndex:
    """All groups of a file, one number each: where they are, and when their sequences ran."""

    parts: array[int] = field(default_factory=lambda: array("i"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    sequences: int = 0
    tokens: int = 0
    generators: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Generator → (started, finished) of each sequence, Unix time."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    """Sequences of each group."""
    scores: array[float] = field(default_factory=lambda: array("d"))
    """Seconds that scoring took, of each sequence for which it was measured."""
    torn: str | None = None

    def place(self, index: int) -> FramePlace:
        """Where a group begins."""
        return FramePlace(self.parts[index], self.offsets[index])


def census(path: Path) -> GroupIndex:
    """Reads the files once, group by group. Damage ends the census, and is reported in `torn`."""
    counted = GroupIndex()
    reader = Reader(path)
    try:
        if not recorded(path):
            return counted
        for group in reader:
            counted.parts.append(reader.place.part)
            counted.offsets.append(reader.place.byte)
            counted.sizes.append(len(group.rollouts))
            _count(counted, group)
        counted.torn = reader.torn
    except StreamError as error:
        counted.torn = str(error)
    return counted


def _count(counted: GroupIndex, group: RolloutGroup) -> None:
    counted.sequences += len(group.rollouts)
    for rollout in group.rollouts:
        counted.tokens += len(rollout.turn.token_ids)
        if 0 < rollout.score_s < math.inf:
            counted.scores.append(rollout.score_s)
        if math.isfinite(rollout.started) and math.isfinite(rollout.finished):
            counted.generators.setdefault(rollout.generator, []).append((rollout.started, rollout.finished))


def chosen(sizes: Sequence[int], most: int = MOST_SEQUENCES) -> list[list[int]]:
    """Indices of the groups that are shown: all as one stretch or, of more than `most` sequences, STRETCHES stretches
    from the first group to the last."""
    if sum(sizes) <= most:
        return [list(range(len(sizes)))] if sizes else []
    each = max(len(sizes) * most // max(sum(sizes), 1) // STRETCHES, 1)
    starts = [round(at * (len(sizes) - each) / (STRETCHES - 1)) for at in range(STRETCHES)]
    picked: list[list[int]] = []
    seen = 0
    for start in starts:
        stretch = list(range(max(start, seen), start + each))
        seen = start + each
        if stretch:
            picked.append(stretch)
    return picked


def bands(path: Path, counted: GroupIndex, training: Training, texts: Texts | None) -> dict[str, Any]:
    """The chosen sequences for the page; those that a limit on tokens or text leaves out are not counted as shown."""
    picked = chosen(counted.sizes)
    note = ""
    rows: list[dict[str, Any]] = []
    for stretch, indices in enumerate(picked):
        budget = _Budget(len(picked))
        for index in indices:
            group = read_group(path, counted.place(index))
            rows += _rows(asked(group, training, texts), stretch, budget)
            if budget.spent:
                note = "more sequences would make this file too large"
                break
    return {
        "rows": rows,
        "shown": len(rows),
        "of": counted.sequences,
        "tokens": counted.tokens,
        "texts": texts is not None,
        "note": note,
    }


class _Budget:
    """The limit of one of several stretches. The first sequence that exceeds it ends the stretch: continuing with
    shorter ones would show long sequences less often than they occur."""

    def __init__(self, stretches: int) -> None:
        self.spent = False
        self._left = [MOST_SEQUENCES // stretches, MOST_TOKENS // stretches, MOST_TEXT // stretches]

    def take(self, tokens: int, text: int) -> bool:
        """Whether one more sequence fits, which is then counted."""
        left = [has - cost for has, cost in zip(self._left, (1, tokens, text), strict=True)]
        self.spent = self.spent or min(left) < 0
        if not self.spent:
            self._left = left
        return not self.spent


def _rows(group: ShownGroup, stretch: int, budget: _Budget) -> list[dict[str, Any]]:
    rows = []
    for answer in group.answers:
        count = min(len(answer.rollout.turn.token_ids), MOST_TOKENS_EACH)
        cost = sum(map(_cost, (answer.texts or [])[:count])) + _cost((group.prompt or "")[:MOST_PROMPT])
        if budget.take(count, cost):
            rows.append(_row(group, answer, count, stretch))
    return rows


def _row(group: ShownGroup, answer: ShownRollout, count: int, stretch: int) -> dict[str, Any]:
    rollout = answer.rollout
    turn = answer.rollout.turn
    return {
        "id": rollout.rollout_id,
        "stretch": stretch,
        "prompt": None if group.prompt is None else group.prompt[:MOST_PROMPT],
        "fate": "left out by the gate" if answer.left_out else group.fate,
        "trained_at": group.trained_at,
        "reward": number(rollout.reward),
        "generator": rollout.generator,
        "finish": turn.finish_reason,
        "started": number(rollout.started),
        "first": number(rollout.started + rollout.first_token_s),
        "finished": number(rollout.finished),
        "count": len(turn.token_ids),
        "spans": [] if answer.versions is None else [[s.start, s.version] for s in turn.token_versions],
        "ids": [int(each) for each in turn.token_ids[:count]],
        "texts": None if answer.texts is None else answer.texts[:count],
        "logprobs": [round(float(each), 3) if math.isfinite(each) else None for each in turn.logprobs[:count]],
    }


def _cost(text: str) -> int:
    """Bytes that a text takes in the page: JSON in ASCII, some characters as `\\u003c`."""
    return 3 + sum(1 if " " <= character < "\x7f" and character not in '<>&"\\' else 6 for character in text)


def busy(counted: GroupIndex, points: int = 400) -> dict[str, Any]:
    """How many sequences each generator had running over time, and for how much of the time it had none."""
    every = [each for spans in counted.generators.values() for each in spans]
    if not every:
        return {"start": 0.0, "end": 0.0, "generators": []}
    start = min(began for began, _ in every)
    end = max(ended for _, ended in every)
    width = (end - start) / points
    found = []
    for name, spans in sorted(counted.generators.items()):
        mean = _mean_running(spans, start, width, points)
        found.append({"name": name, "running": mean, "idle_s": round(_idle(spans, start, end), 3)})
    return {"start": start, "end": end, "generators": found}


def _mean_running(spans: Sequence[tuple[float, float]], start: float, width: float, points: int) -> list[float]:
    """[points] mean number of sequences in each interval of `width` seconds."""
    if width <= 0:
        return [float(len(spans))] * points
    seconds = [0.0] * points
    changes = [0] * (points + 1)
    for began, ended in spans:
        first, last = (min(int((at - start) / width), points - 1) for at in (began, ended))
        if first == last:
            seconds[first] += ended - began
            continue
        seconds[first] += start + (first + 1) * width - began
        seconds[last] += ended - (start + last * width)
        changes[first + 1] += 1
        changes[last] -= 1
    whole = 0
    mean = []
    for at in range(points):
        whole += changes[at]
        mean.append(round(max(seconds[at] / width, 0.0) + whole, 2))
    return mean


def _idle(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between `start` and `end` in which none of the spans was."""
    idle = 0.0
    reached = start
    for began, ended in sorted(spans):
        idle += max(began - reached, 0.0)
        reached = max(reached, ended)
    return idle + max(end - reached, 0.0)
