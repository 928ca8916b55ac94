"""Clocks of several hosts: what heartbeats measure, what of it is written, and where it moves a trace."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import msgspec
import pytest
from fake_generator import eventually
from report_samples import make_one

from inflight.bus import Link, Listener
from inflight.bus.round_trips import KEPT, RoundTrips
from inflight.clocks import CLOCKS_FILE, EVERY_S, ClockLog, Clocks
from inflight.config import BusConfig
from inflight.messages import ClockOffset
from inflight.metrics import read_lines
from inflight.report import trace
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer

AHEAD_S = 1234.5


def test_the_offset_of_a_clock_is_known_to_within_half_a_round_trip(bus_endpoint: str) -> None:
    """Over a real socket, between two clocks that are a quarter of an hour apart."""
    beats = BusConfig(heartbeat_s=0.02, dead_after_s=20.0)
    with (
        Listener(bus_endpoint, beats, clock=lambda: time.time() + AHEAD_S) as listener,
        Link(bus_endpoint, "a0", beats),
    ):
        eventually(lambda: "a0" in listener.offsets())
        found = listener.offsets()["a0"]
        assert abs(found.ahead_s - AHEAD_S) <= found.round_trip_s / 2 + 1e-6  # Unix time has no more digits
    assert 0 < found.round_trip_s < 20.0


def test_a_peer_that_has_left_has_no_offset(bus_endpoint: str) -> None:
    beats = BusConfig(heartbeat_s=0.02, dead_after_s=20.0)
    with Listener(bus_endpoint, beats) as listener:
        with Link(bus_endpoint, "a0", beats):
            eventually(lambda: "a0" in listener.offsets())
        eventually(lambda: not listener.offsets())


def test_the_least_round_trip_counts_and_old_ones_do_not() -> None:
    """The way there takes longer than the way back: half of the difference is the error, below half of the trip."""
    now = 100.0
    trips = RoundTrips(lambda: now)
    assert trips.best is None
    for there, back in ((0.5, 0.1), (0.01, 0.03), (0.2, 0.2)):
        asked = now
        now += there + back
        trips.answered(asked, asked + there + 7.0)
    assert trips.best is not None
    assert trips.best.round_trip_s == pytest.approx(0.04)
    assert trips.best.ahead_s == pytest.approx(7.0 - 0.01)
    trips.answered(now + 1.0, now)  # this clock was set back meanwhile
    assert trips.best.round_trip_s == pytest.approx(0.04)
    for _ in range(KEPT):
        asked = now
        now += 1.0
        trips.answered(asked, asked + 0.5)
    assert trips.best.round_trip_s == pytest.approx(1.0)


def test_offsets_are_written_when_they_are_news(tmp_path: Path) -> None:
    now = 1000.0
    log = ClockLog(tmp_path, lambda: now)
    hosts = {"a0": "node1", "a1": "node2"}
    log.note({"a0": ClockOffset(2.0, 0.4), "g0": ClockOffset(0.0, 0.1)}, hosts)  # g0 is on this host
    log.note({"a0": ClockOffset(2.1, 0.3), "a1": ClockOffset(math.nan, 0.1)}, hosts)
    log.note({"a0": ClockOffset(2.2, 0.1)}, hosts)
    now += EVERY_S
    log.note({"a0": ClockOffset(2.3, 0.5)}, hosts)
    assert read_lines(tmp_path / CLOCKS_FILE) == [
        {"time": 1000.0, "process": "a0", "host": "node1", "ahead_s": 2.0, "round_trip_s": 0.4},
        {"time": 1000.0, "process": "a0", "host": "node1", "ahead_s": 2.2, "round_trip_s": 0.1},
        {"time": 1000.0 + EVERY_S, "process": "a0", "host": "node1", "ahead_s": 2.3, "round_trip_s": 0.5},
    ]


def test_a_moment_is_moved_by_what_was_measured_before_it(tmp_path: Path) -> None:
    log = ClockLog(tmp_path, iter((1000.0, 2000.0)).__next__)
    for ahead in (10.0, 20.0):
        log.note({"a0": ClockOffset(ahead, 0.0)}, {"a0": "node1"})
    clocks = Clocks(tmp_path)
    assert [clocks.aligned("a0", moment) for moment in (5.0, 995.0, 1979.0, 1985.0)] == [15.0, 1005.0, 1989.0, 2005.0]
    assert clocks.aligned("a1", 5.0) == 5.0
    assert Clocks(tmp_path / "none").aligned("a0", 5.0) == 5.0


@pytest.mark.parametrize("line", ['{"time": 1.0, "process": "a0"}', '{"time": "x"}', "{"])
def test_a_damaged_file_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / CLOCKS_FILE).write_text(line + "\n")
    with pytest.raises(ValueError, match=r"clocks\.jsonl.* damaged"):
        Clocks(tmp_path)


def test_a_trace_has_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {index: make_one(index, 1, 12) for index in (20, 21)}
    raw = {index: group.rollouts[0] for index, group in made.items()}
    with Writer(tmp_path / ROLLOUTS_FILE) as writer:
        for index, actor in ((20, "a0"), (21, "a1")):
            of_actor = [msgspec.structs.replace(raw[index], actor=actor)]
            writer.append(msgspec.structs.replace(made[index], rollouts=of_actor))
    ClockLog(tmp_path, lambda: 1000.0).note({"a1": ClockOffset(-300.0, 0.02)}, {"a1": "node1"})
    assert trace.main([str(tmp_path)]) == 0
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts = {each["name"]: each["ts"] / 1e6 for each in written if each["ph"] == "X"}
    assert starts == {
        "q20/0": pytest.approx(raw[20].started),
        "score q20/0": pytest.approx(raw[20].finished),
        "q21/0": pytest.approx(raw[21].started - 300.0),
        "score q21/0": pytest.approx(raw[21].finished - 300.0),
    }
    said = capsys.readouterr().err
    assert "times of a1 are moved by -300.000000 s at the end, to within 0.010000 s" in said
