"""The bench of ways to update a generator, with the tiny model on a CPU: every way delivers what the trainer holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ARMS = ["inflight", "abort_resume", "synchronous"]


def test_every_arm_trains_and_delivers_the_trainers_weights(tmp_path):
    command = [
        sys.executable, "-m", "bench.peers", "--config-name", "peers_cpu", f"out={tmp_path}",
        f"arms=[{','.join(ARMS)}]",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    arms = {arm["arm"]: arm for arm in json.loads((tmp_path / "results.json").read_text())["arms"]}
    assert list(arms) == ARMS
    for name, arm in arms.items():
        compared = [each["g0"] for each in arm["compared"]]
        assert arm["steps"] >= 2, name
        assert [each["agrees"] for each in compared] == [True, True], f"{name}: the engine holds other weights"
        assert compared[1]["version"] == compared[0]["version"] + 1, "of which its own way has delivered the second"
        assert arm["delivered_equal_share"] == 1.0, f"{name}: inflight's transfer of the same weights answers otherwise"
        assert set(arm["failed"]) <= {"run finished"}, name
        assert arm["to_target_s"] is not None
    assert arms["synchronous"]["lag_mean"] == 0.0
    assert arms["inflight"]["generator_paused_share"] == 0.0
    assert arms["abort_resume"]["generator_paused_share"] > 0.0
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} | 1 |" in table for name in ARMS)
