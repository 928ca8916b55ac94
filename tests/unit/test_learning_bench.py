"""The learning bench continues when a run fails. Its launches are real; none gets as far as starting a generator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def bench(out: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.learning", f"out={out}", "only=[synchronous,gate]", "seeds=[0]", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_that_takes_too_long_is_one_line_and_the_next_one_runs(tmp_path: Path) -> None:
    done = bench(tmp_path, "timeout_s=0.1")
    said = [line for line in done.stderr.splitlines() if "not done within timeout_s=0.1" in line]
    assert [line.split(":")[0] for line in said] == ["synchronous, seed 0", "gate, seed 0"] * 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert not list(tmp_path.glob("table.md"))


def test_a_run_that_fails_tells_its_last_line(tmp_path: Path) -> None:
    done = bench(tmp_path, "base=nonesuch", "only=[gate]")
    assert done.returncode == 1
    assert "gate, seed 0: exit code 2: inflight launch: " in done.stderr
    assert "nonesuch" in done.stderr
    assert "Traceback" not in done.stderr
    assert "nonesuch" in (tmp_path / "runs" / "gate-0.log").read_text()
