"""The interruption bench's trace: a token that was delayed somewhere is reported as delayed there."""

from __future__ import annotations

import pytest

from bench.gpu_gaps import Timeline, Update
from bench.gpu_trace import WAY, Trace, late, show

STEP, LATE_AT = 0.005, 200
UPDATE = Update(began=10.9, ended=11.01, swap_began=10.998)


def told(part: int, seconds: float, drift: float = 0.0) -> tuple[Timeline, Trace]:
    """One token per step, each 0.1 ms in each part of its way; step LATE_AT takes `seconds` longer in one of them. With
    `drift`, the device's clock goes wrong by so much a step."""
    timeline, trace, last = Timeline(), Trace(), 0.0
    rank = {"steps": [], "spans": [("KeyValueStore.reply", 10.9995, 11.0005), ("KeyValueStore.take", 10.9, 10.901)]}
    for i in range(400):
        late_by = [seconds if i == LATE_AT and k == part else 0.0 for k in range(len(WAY))]
        ends = [10.0 + i * STEP]
        for more in late_by:
            ends.append(ends[-1] + 0.0001 + more)
        done, got, handed, made, at = ends[1:]
        timeline.add(at, 64, at - last if i else 0.0, made)
        rank["steps"].append((done + i * drift, got, handed))
        last = at
    trace.add([{"steps": [], "spans": []}, rank])
    return timeline, trace


@pytest.mark.parametrize("part", range(len(WAY)))
def test_what_held_a_token_up_is_named(part: int) -> None:
    timeline, trace = told(part, 0.0012)
    (found,) = late(timeline, [UPDATE], trace)
    assert found["held_up"] == WAY[part]
    assert found["longer_ms"][WAY[part]] == pytest.approx(1.2, abs=0.002)
    assert sum(found["longer_ms"].values()) == pytest.approx(found["gap_ms"] - 5.0, abs=0.01)
    assert [what for what, *_ in found["beside"]] == ["KeyValueStore.reply"]
    assert WAY[part] in show([found])


def test_clocks_that_drift_apart_have_no_effect() -> None:
    (found,) = late(*(lambda timeline, trace: (timeline, [UPDATE], trace))(*told(2, 0.0012, drift=1e-6)))
    assert found["held_up"] == WAY[2]
    assert found["longer_ms"][WAY[0]] == pytest.approx(0.0, abs=0.002)


def test_a_token_on_time_is_not_late() -> None:
    timeline, trace = told(0, 0.0)
    assert late(timeline, [UPDATE], trace) == []


def test_a_worker_that_noted_nothing_leaves_the_gap_alone() -> None:
    timeline, _ = told(3, 0.0012)
    (found,) = late(timeline, [UPDATE], Trace())
    assert "held_up" not in found
    assert "unknown" in show([found])
