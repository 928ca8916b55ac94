"""`inflight doctor` on this machine, with a real torch and a real vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_the_machine_that_runs_these_tests_can_do_a_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "inflight.cli", "doctor", "--config-name", "tiny", f"run_dir={tmp_path}/run"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1].isalpha()]
    said = {text[:17].strip() for state, text in lines if state in ("ok", "warn")}
    assert {"Python", "torch", "vLLM", "vLLM patch", "vLLM plugin", "model", "disk", "open files"} <= said
    assert not (tmp_path / "run").exists(), "a check leaves nothing"
