"""Metrics as JSON lines."""

from __future__ import annotations

import resource
import signal

import pytest

from inflight.metrics import JsonLines, counts_of, read_lines


def test_lines_come_back_as_written(tmp_path):
    with JsonLines(tmp_path / "m.jsonl") as lines:
        lines.write({"step": 1, "dropped": {"old": 2}, "list": [1.5, "x"]})
    with JsonLines(tmp_path / "m.jsonl") as lines:
        lines.write({"step": 2})
    assert read_lines(tmp_path / "m.jsonl") == [{"step": 1, "dropped": {"old": 2}, "list": [1.5, "x"]}, {"step": 2}]


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path):
    with JsonLines(tmp_path / "m.jsonl") as lines:
        lines.write({"step": 1})
        assert read_lines(tmp_path / "m.jsonl") == [{"step": 1}]


def test_what_is_no_number_becomes_null(tmp_path):
    with JsonLines(tmp_path / "m.jsonl") as lines:
        lines.write({"loss": float("nan"), "deep": {"x": [float("inf"), 1.0]}, 3: "integer key"})
    assert read_lines(tmp_path / "m.jsonl") == [{"loss": None, "deep": {"x": [None, 1.0]}, "3": "integer key"}]


def test_an_unfinished_last_line_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2')
    assert read_lines(tmp_path / "m.jsonl") == [{"step": 1}]


def test_counts_are_an_object_of_whole_numbers():
    line = {"failed": {"late": 2}, "null": None}
    line |= {"figure": 5, "list": [2], "text": {"late": "2"}, "flag": {"late": True}}
    assert counts_of(line, "failed") == {"late": 2}
    assert counts_of(line, "null") == counts_of(line, "missing") == {}
    for damaged in ("figure", "list", "text", "flag"):
        with pytest.raises(ValueError, match=f"^{damaged} is .*, not an object of whole numbers$"):
            counts_of(line, damaged)


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read_lines(tmp_path / "m.jsonl")


def test_no_file_is_no_lines(tmp_path):
    assert read_lines(tmp_path / "none") == []


def test_a_line_that_does_not_fit_leaves_no_half(tmp_path):
    """With a limit on the file's size as on a full disk: what is there stays readable, and later lines can follow."""
    path = tmp_path / "m.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with JsonLines(path) as lines:
            lines.write({"step": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
            with pytest.raises(OSError):
                lines.write({"text": "x" * 100})
            lines.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
