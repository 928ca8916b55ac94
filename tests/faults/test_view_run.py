"""The live view of a real run in real terminals: of the launcher in one, of `inflight watch` in another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run import ALWAYS, BOUND_S, LAUNCHER

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from terminal import Terminal

pytestmark = pytest.mark.faults
SILENCE_S = 10.0


def started(terminal: Terminal, *command: str) -> subprocess.Popen[bytes]:
    """A process whose standard streams are the terminal."""
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    environment = {**os.environ, "TERM": "xterm-256color"}
    for size in ("COLUMNS", "LINES"):
        environment.pop(size, None)
    return subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **ends)


def until(condition, process: subprocess.Popen[bytes], terminal: Terminal) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, terminal.text
        assert process.poll() is None, terminal.text
        time.sleep(0.1)


def kept(terminal: Terminal, name: str) -> None:
    """For eyes: what the terminal shows, where INFLIGHT_SCREENS names a folder."""
    if folder := os.environ.get("INFLIGHT_SCREENS"):
        Path(folder, f"{name}.txt").write_text(terminal.text + "\n")


def test_a_run_is_seen_in_80_and_in_200_columns(tmp_path):
    """The launcher's screen changes at least every ten seconds from the first one to the last; a second terminal shows
    the same run, and both say how it ended. What a task's questions hold does not control the terminal."""
    overrides = [f"run_dir={tmp_path}/run", *ALWAYS, "trainer.steps=12", "generator.count=2"]
    with Terminal(80, 24) as narrow, Terminal(200, 40) as wide:
        launcher = started(narrow, str(LAUNCHER), *overrides)
        changed, longest, seen = time.monotonic(), 0.0, len(narrow.raw)
        watcher = None
        deadline = time.monotonic() + BOUND_S
        while launcher.poll() is None:
            assert time.monotonic() < deadline, narrow.text
            if len(narrow.raw) != seen:
                longest, changed, seen = max(longest, time.monotonic() - changed), time.monotonic(), len(narrow.raw)
            if watcher is None and re.search(r"swaps +g\d → [2-9]", narrow.text):
                watcher = started(wide, "-m", "inflight.cli", "watch", f"{tmp_path}/run")
                kept(narrow, "launch-80")
            if re.search(r"[4-9]/12", wide.text) and re.search(r"swaps +g\d", wide.text):
                kept(wide, "watch-200")
            time.sleep(0.05)
        assert launcher.returncode == 0, narrow.text
        assert watcher is not None, narrow.text
        assert watcher.wait(timeout=60) == 0, wide.text
        for terminal in (narrow, wide):
            terminal.release()
        kept(narrow, "launch-80-end")
        kept(wide, "watch-200-end")
    assert longest < SILENCE_S, f"nothing was shown for {longest:.1f} s"
    for said in (r"12/12", r"reward +[▁-█]+", r"swaps +g\d → 12 +gap", r"complete, 12"):
        assert re.search(said, wide.text), f"{said} is not in\n{wide.text}"
    history = narrow.raw.decode(errors="replace")
    for said in ("12/12", "groups wait", "up to date", "gap"):
        assert said in history, f"{said} was never in the narrow view"
