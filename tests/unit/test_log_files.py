"""Logs of processes on disk: bounded, with one older file, and the last words across it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import pytest

from inflight.launcher.compose import compose
from inflight.launcher.last_words import END_BYTES, last_lines
from inflight.launcher.launch import launch
from inflight.launcher.log_files import BoundedLogs, older_of
from inflight.starters.base import Command

MIB = 1 << 20
LINE = b"x" * 99 + b"\n"


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "a0.log"


def free(monkeypatch, nbytes: int) -> None:
    """The disk has this much room."""
    usage = shutil.disk_usage("/")._replace(free=nbytes)
    monkeypatch.setattr("inflight.launcher.log_files.shutil.disk_usage", lambda _: usage)


def test_a_log_that_has_its_size_begins_anew_and_one_older_file_is_kept(log):
    logs = BoundedLogs(log.parent, 1)
    with log.open("ab", buffering=0) as inherited:
        inherited.write(b"1\n" + LINE * 9000)
        logs.look()
        assert not older_of(log).exists()  # below its size
        inherited.write(LINE * 2000)
        logs.look()
        assert log.stat().st_size == 0
        assert older_of(log).read_bytes() == (b"1\n" + LINE * 11000)[-older_of(log).stat().st_size :]
        inherited.write(b"2\n")  # by the descriptor from before, as a process has it
        assert log.read_bytes() == b"2\n"
        inherited.write(LINE * 11000 + b"3\n")
        logs.look()
        inherited.write(b"4\n")
        assert older_of(log).read_bytes().endswith(LINE + b"3\n")
        assert log.read_bytes() == b"4\n"
        assert sorted(path.name for path in log.parent.iterdir()) == ["a0.log", "a0.log.1"]


def test_of_a_log_from_before_there_was_a_bound_the_end_is_kept(log):
    with log.open("wb") as file:
        file.truncate(64 << 30)  # a hole: takes no room
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    BoundedLogs(log.parent, 1).look()
    assert log.stat().st_size == 0
    assert older_of(log).stat().st_size == MIB
    assert last_lines(log, 1) == ["the end"]


def test_the_last_words_are_those_of_both_files(log):
    older_of(log).write_bytes(LINE * 20000 + b"Traceback\nValueError: the rea")
    log.write_bytes(b"son\nended\n")
    assert last_lines(log, 3) == ["Traceback", "ValueError: the reason", "ended"]
    log.write_bytes(b"last\n" * (END_BYTES // 5 + 1))
    assert set(last_lines(log, END_BYTES)) == {"last", ""}  # what is read is bounded, and of the log itself
    log.unlink()
    assert last_lines(log, 1) == ["ValueError: the rea"]


@pytest.mark.parametrize("why", ["no room", "no copy can be written"])
def test_a_log_that_cannot_be_copied_is_bounded_all_the_same(log, monkeypatch, why):
    if why == "no room":
        free(monkeypatch, MIB - 1)
        older_of(log).write_bytes(b"from long ago\n")
    else:
        older_of(log).symlink_to(log.parent / "gone" / "file")
    logs = BoundedLogs(log.parent, 1)
    log.write_bytes(LINE * 11000 + b"the reason\n")
    logs.look()
    assert log.stat().st_size > MIB
    assert last_lines(log, 1) == ["the reason"]  # on a full disk above all
    assert not os.path.lexists(older_of(log))  # makes room, and is not what the log held before
    with log.open("ab") as file:
        file.write(LINE * 11000)
    if why == "no room":
        logs.look()
        assert log.stat().st_size == 0
        assert last_lines(log, 1) == []
    else:
        logs.look()  # the obstacle is gone
        assert older_of(log).stat().st_size == MIB


def test_one_log_that_cannot_be_read_leaves_the_others_bounded(tmp_path):
    (tmp_path / "a0.log").mkdir()
    (tmp_path / "a1.log").symlink_to("/dev/zero")
    (tmp_path / "a2.log").symlink_to("gone")
    (tmp_path / "b.log.1").mkdir()
    for name in ("b.log", "c.log"):
        (tmp_path / name).write_bytes(LINE * 11000)
    BoundedLogs(tmp_path, 1).look()
    assert (tmp_path / "b.log").stat().st_size > MIB
    assert (tmp_path / "c.log").stat().st_size == 0
    (tmp_path / "b.log").write_bytes(LINE * 22000)
    BoundedLogs(tmp_path, 1).look()
    assert (tmp_path / "b.log").stat().st_size == 0


CHATTY = """
import os, subprocess, sys, time
from pathlib import Path
log = Path(os.environ["LOG"])
for number in range(11000):
    print("x" * 99)
sys.stdout.flush()
deadline = time.monotonic() + 60
while (not log.with_name("trainer.log.1").exists() or log.stat().st_size) and time.monotonic() < deadline:
    time.sleep(0.02)
subprocess.run([sys.executable, "-c", "print('ValueError: of a child', flush=True)"])
sys.exit(1)
"""


def test_in_a_run_the_reason_of_an_end_is_shown_across_the_files(tmp_path, capfd):
    config = compose("tiny", [f"run_dir={tmp_path}/run", "launch.log_mib=1"])
    log = config.logs / "trainer.log"
    command = Command("trainer", "trainer", [sys.executable, "-c", CHATTY], log, {"LOG": str(log)})
    assert launch(dataclasses.replace(config, chosen=None), [command]) == 1
    assert "trainer | " + "x" * 99 + "\n  trainer | ValueError: of a child\n" in capfd.readouterr().err
    assert log.read_text() == "ValueError: of a child\n"
