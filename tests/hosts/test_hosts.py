"""Whole runs over several hosts: network namespaces of this machine that share neither memory nor a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader
from tests.faults.run import ALWAYS
from tests.faults.run import Run as OneHost
from tests.hosts.namespaces import ROOT, Hosts, missing

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(missing()), reason=missing() or "")]

RUN_S = 900.0
STAND_INS = ROOT / "tests" / "faults" / "launcher.py"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(3, tmp_path) as hosts:
        yield hosts


class Run(OneHost):
    """A run with its trainer on the first host, a generator on each of the others, and the actor on the last."""

    def __init__(self, hosts: Hosts, *overrides: str, vllm: bool = False) -> None:
        super().__init__(hosts.folder / "run" / "tiny")
        self.hosts = hosts
        there = [hosts.address(1), hosts.address(2)]
        program = ["-m", "inflight.launcher", "--config-name", "tiny"] if vllm else [str(STAND_INS), *ALWAYS]
        python = hosts.python if vllm else f"{hosts.python} {ROOT}/tests/hosts/hosted.py"
        self._launcher = hosts.within(
            0, sys.executable, *program, f"run_dir={self.folder}", f"network.bind={hosts.address(0)}",
            "network.ports=21000-21999", "generator.count=2", "hosts.starter=ssh", f"hosts.names=[{','.join(there)}]",
            f"hosts.actors=[{there[1]}]", f"hosts.python='{python}'", f"hosts.ssh='{' '.join(hosts.ssh)}'",
            *overrides, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def finish(self) -> str:
        """All steps are done; what the launcher said."""
        deadline = time.monotonic() + RUN_S
        while not self.ended():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)
        assert self.wait() == 0, self.logs()
        return self.output

    def samplers(self) -> Counter[str]:
        """How many rollouts each generator has sampled."""
        groups = Reader(self.folder / ROLLOUTS_FILE)
        return Counter(rollout.generator for group in groups for rollout in group.rollouts)

    def nothing_left(self) -> None:
        """No process and no file of the run is left on the other hosts."""
        for number in (1, 2):
            looking = self.hosts.within(number, "ls", "/dev/shm", stdout=subprocess.PIPE)
            assert looking.communicate(timeout=60)[0].split() == ["models"]
            left = [line for line in self.hosts.processes(number) if "hosts" in line or "inflight." in line]
            assert not left


@pytest.fixture
def started() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(hosts: Hosts, *overrides: str, vllm: bool = False) -> Run:
        runs.append(Run(hosts, *overrides, vllm=vllm))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def test_a_run_by_ssh(three: Hosts, started: Callable[..., Run]) -> None:
    run = started(three, "trainer.steps=6")
    run.finish()
    assert run.steps() == 6
    assert set(run.samplers()) == {"g0", "g1"}
    run.account()
    run.nothing_left()
