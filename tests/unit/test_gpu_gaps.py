"""The interruption bench's arithmetic: a planted stall must come out as its own length, and nothing as nothing."""

from __future__ import annotations

import bisect

import pytest

from bench.gpu_gaps import Timeline, Update, control, judge, percentile, summarize


def timeline(stall_at: float = 0.0, stall: float = 0.0, step: float = 0.005, end: float = 4.0) -> Timeline:
    """64 tokens a step; one gap longer by `stall` where `stall_at` falls."""
    made, now, last = Timeline(), 10.0, 10.0
    while now < 10.0 + end:
        now = last + step + (stall if last <= stall_at < last + step + stall else 0.0)
        made.add(now, 64, now - last)
        last = now
    return made


def test_a_stall_is_found_and_measured() -> None:
    update = Update(began=12.0, ended=12.06, swap_began=12.05)
    judged = judge(timeline(stall_at=12.052, stall=0.1), update)
    assert judged.base_s == pytest.approx(0.005)
    assert judged.extra_s == pytest.approx(0.1)
    assert judged.during_s == pytest.approx(0.1)


def test_a_stall_before_the_swap_counts_as_lost_time_only() -> None:
    judged = judge(timeline(stall_at=12.02, stall=0.01), Update(began=12.0, ended=12.09, swap_began=12.06))
    assert judged.extra_s == pytest.approx(0.0, abs=1e-9)
    assert judged.during_s == pytest.approx(0.01)


def test_an_update_without_load_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the load ended"):
        judge(timeline(end=1.0), Update(began=20.0, ended=20.1, swap_began=20.0))


def test_control_looks_between_updates() -> None:
    updates = [Update(began=at, ended=at + 0.05, swap_began=at) for at in (11.0, 12.2, 13.4)]
    quiet = control(timeline(end=6.0), updates)
    assert len(quiet) == 2
    assert quiet == pytest.approx([0.0, 0.0], abs=1e-9)


def test_control_finds_the_quiet_moment_of_one_update_a_second() -> None:
    updates = [Update(began=at, ended=at + 0.09, swap_began=at + 0.08) for at in (11.0, 12.0, 13.0)]
    assert len(control(timeline(end=6.0), updates)) == 2


def test_control_leaves_out_where_fresh_sequences_began() -> None:
    updates = [Update(began=at, ended=at + 0.09, swap_began=at + 0.08) for at in (11.0, 12.0)]
    made = timeline(end=6.0)
    made.gap[bisect.bisect_left(made.at, 11.4)] = 0.0
    assert control(made, updates) == []


def test_summary_counts_tokens_lost() -> None:
    updates = [Update(began=12.0, ended=12.01, swap_began=12.0)]
    figures = summarize("x", timeline(stall_at=12.002, stall=0.1), updates, baseline_rate=64 / 0.005)
    assert figures["extra_gap_ms"]["max"] == pytest.approx(100.0, abs=0.01)
    assert figures["tokens_lost_per_update"] == pytest.approx(1280, abs=1)
    assert max(figures["gaps_around_raw_ms"][0]) == pytest.approx(105.0, abs=0.01)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentile_is_a_value_that_was_seen(share: float, expected: float) -> None:
    assert percentile([float(i) for i in range(1, 101)], share) == expected


def test_a_late_way_to_the_client_is_not_the_engines() -> None:
    made, last = Timeline(), 10.0
    for index in range(1, 800):
        now = 10.0 + 0.005 * index
        seen = now + (0.003 if index == 410 else 0.0)
        made.add(seen, 64, seen - last, now)
        last = seen
    judged = judge(made, Update(began=12.0, ended=12.06, swap_began=12.04))
    assert judged.extra_s == pytest.approx(0.003)
    assert judged.core_extra_s == pytest.approx(0.0, abs=1e-9)
