"""Whole runs over several hosts: network namespaces of this machine that share neither memory nor a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.metrics import METRICS_FILE, read_lines
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader
from tests.hosts.namespaces import ROOT, Hosts, missing

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(missing()), reason=missing() or "")]

RUN_S = 900.0
STEPS = 6


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(3, tmp_path) as hosts:
        yield hosts


class Run:
    """The tiny run on the first host, with a generator on each of the others and the actor on the last."""

    def __init__(self, hosts: Hosts, *overrides: str) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "run" / "tiny"
        self.launcher = hosts.within(
            0, sys.executable, "-m", "inflight.launcher", "--config-name", "tiny", f"run_dir={self.folder}",
            f"network.bind={hosts.address(0)}", "generator.count=2", f"trainer.steps={STEPS}",
            "publish.join_timeout_s=400", "generator.start_timeout_s=400", "rollout.keep=true", *overrides,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    @staticmethod
    def by_ssh(hosts: Hosts) -> list[str]:
        there = [hosts.address(1), hosts.address(2)]
        return [
            "hosts.starter=ssh", f"hosts.names=[{','.join(there)}]", f"hosts.actors=[{there[1]}]",
            f"hosts.python='{hosts.python}'", f"hosts.ssh=[{','.join(hosts.ssh)}]", "hosts.lease_s=20",
        ]  # fmt: skip

    def end(self, code: int = 0) -> str:
        said, _ = self.launcher.communicate(timeout=RUN_S)
        logs = "".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in (self.folder / "logs").glob("*.log"))
        assert self.launcher.returncode == code, said + logs
        return said

    def steps(self) -> int:
        file = self.folder / METRICS_FILE
        return len(read_lines(file)) if file.exists() else 0

    def await_steps(self, steps: int) -> None:
        deadline = time.monotonic() + RUN_S
        while self.steps() < steps:
            assert self.launcher.poll() is None, self.launcher.stdout and self.launcher.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def generators(self) -> Counter[str]:
        """How many rollouts each has sampled."""
        groups = Reader(self.folder / ROLLOUTS_FILE)
        return Counter(rollout.generator for group in groups for rollout in group.rollouts)

    def audit(self) -> None:
        command = [sys.executable, "-m", "inflight.cli", "audit", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_over_three_hosts_by_ssh(three: Hosts) -> None:
    """Trainer, two generators and the actor on different hosts, with keys; nothing of the run is left on the others."""
    run = Run(three, *Run.by_ssh(three))
    said = run.end()
    assert f"{STEPS}" in said
    assert run.steps() == STEPS
    assert set(run.generators()) == {"g0", "g1"}
    run.audit()
    for number in (1, 2):
        left = three.within(number, "sh", "-c", "ls /dev/shm; pgrep -f inflight.hosted", stdout=subprocess.PIPE)
        assert left.communicate(timeout=60)[0].split() == ["models"]
