"""Whole runs over several hosts: network namespaces of this machine that share neither memory nor a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.clocks import CLOCKS_FILE
from inflight.metrics import read_lines
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader
from tests.faults.run import ALWAYS, LAUNCHER
from tests.faults.run import Run as OneHost
from tests.hosts.namespaces import ROOT, Hosts, missing

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(missing()), reason=missing() or "")]

RUN_S = 900.0
OURS = ("tests/hosts/", "tests.hosts.", "inflight.")
"""What a command line of a run's process has; that of sshd has the test's folder, which may be called anything."""
JOINED = ("hosts.starter=join", "hosts.actors_join=true")
SETTINGS = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "INFLIGHT_JOIN_KEY": "k" * 43}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(3, tmp_path) as hosts:
        yield hosts


class Run(OneHost):
    """A run with its trainer on the first host, a generator on each of the others, and the actor on the last."""

    def __init__(
        self,
        hosts: Hosts,
        *overrides: str,
        vllm: bool = False,
        ssh: bool = True,
        slowest_s: float = 0.6,
        count: int = 2,
    ) -> None:
        super().__init__(hosts.folder / "run" / "tiny")
        self.hosts = hosts
        program = ["-m", "inflight.launcher", "--config-name", "tiny"] if vllm else [str(LAUNCHER), *ALWAYS]
        stand_in = f"env STAND_IN_SLOWEST_S={slowest_s} {hosts.python} {ROOT}/tests/hosts/hosted.py"
        self.python = hosts.python if vllm else stand_in
        self._command = [
            *program,
            f"run_dir={self.folder}",
            f"network.bind={hosts.address(0)}",
            "network.ports=21000-21999",
            f"generator.count={count}",
            *(self._by_ssh() if ssh else JOINED),
            *overrides,
        ]
        self.start()
        self.joined = [] if ssh else [self.join(1), self.join(2), self.join(2, "--kind", "actor")]

    def start(self, *more: str) -> OneHost:
        """The launcher, in the background."""
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._launcher = self.hosts.within(0, sys.executable, *self._command, *more, **output, env=SETTINGS)
        return self

    def _by_ssh(self) -> list[str]:
        there = [self.hosts.address(1), self.hosts.address(2)]
        return [
            "hosts.starter=ssh",
            f"hosts.names=[{','.join(there)}]",
            f"hosts.actors=[{there[1]}]",
            f"hosts.python='{self.python}'",
            f"hosts.ssh='{' '.join(self.hosts.ssh)}'",
            "hosts.lease_s=15",
        ]

    def join(self, number: int, *arguments: str) -> subprocess.Popen[str]:
        """`inflight join` on a host."""
        program = (
            [*self.python.split(), "join"]
            if "hosted.py" in self.python
            else [*self.python.split(), "-m", "inflight.cli", "join"]
        )
        return self.hosts.within(number, *program, self.hosts.address(0), *arguments, env=SETTINGS)

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

    def until_nothing_left(self) -> None:
        """At the latest when the leases are over."""
        deadline = time.monotonic() + RUN_S
        while self._left(1) or self._left(2):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        self.nothing_left()

    def nothing_left(self) -> None:
        """No process and no file of the run is left on the other hosts."""
        for number in (1, 2):
            looking = self.hosts.within(number, "ls", "/dev/shm", stdout=subprocess.PIPE)
            assert looking.communicate(timeout=60)[0].split() == ["models"]
            assert not self._left(number)

    def generators(self, number: int) -> set[str]:
        """Command lines of the generators on a host, each with a folder of its own."""
        return {line for line in self.hosts.processes(number) if "--run-dir" in line and "--name g" in line}

    def _left(self, number: int) -> list[str]:
        """Command lines of the run's processes on a host."""
        return [line for line in self.hosts.processes(number) if any(name in line for name in OURS)]


@pytest.fixture
def started() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(hosts: Hosts, *overrides: str, **how: Any) -> Run:
        runs.append(Run(hosts, *overrides, **how))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.mark.parametrize("ssh", [True, False], ids=["ssh", "join"])
def test_trainer_generators_and_actor_on_three_hosts(three: Hosts, started: Callable[..., Run], ssh: bool) -> None:
    run = started(three, "trainer.steps=30", ssh=ssh, slowest_s=2.0)  # the actor may find the second generator late
    run.finish()
    assert run.steps() == 30
    assert set(run.samplers()) == {"g0", "g1"}
    run.account()
    assert [each.wait(60) for each in run.joined] == [0] * len(run.joined)
    run.nothing_left()
    clocks = read_lines(run.folder / CLOCKS_FILE)
    assert {line["process"] for line in clocks} == {"g0", "g1", "a0"}
    assert all(abs(line["ahead_s"]) <= line["round_trip_s"] / 2 + 1e-6 for line in clocks), "these hosts have one clock"


@pytest.mark.vllm
def test_real_engines_by_ssh_and_the_audit_of_their_tags(three: Hosts, started: Callable[..., Run]) -> None:
    """The other hosts have no copy of the model, and none of the run folder."""
    slow_machine = ("publish.join_timeout_s=400", "generator.start_timeout_s=400")
    run = started(three, "trainer.steps=6", "launch.line_every_s=1", *slow_machine, vllm=True)
    run.finish()
    assert run.steps() == 6
    assert set(run.samplers()) == {"g0", "g1"}
    run.nothing_left()
    command = [sys.executable, "-m", "inflight.cli", "audit", str(run.folder)]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_a_generator_that_nobody_configured_joins_and_leaves(three: Hosts, started: Callable[..., Run]) -> None:
    run = started(three, "trainer.steps=80", "hosts.most_generators=2", count=1, ssh=False, slowest_s=2.0)
    run.until(lambda: set(run.routed()) == {"g0", "g1"}, alive=True)
    run.until(lambda: "g1" in run.samplers(), alive=True)
    number = next(each for each in (1, 2) if any("--name g1" in line for line in three.processes(each)))
    run.joined[number - 1].terminate()
    run.until(lambda: set(run.routed()) == {"g0"}, alive=True)
    run.joined[number - 1] = run.join(number)
    run.until(lambda: set(run.routed()) == {"g0", "g2"}, alive=True)
    said = run.finish()
    assert "g1 has left the run" in said
    assert run.steps() == 80
    assert set(run.samplers()) == {"g0", "g1", "g2"}
    run.account()
    run.nothing_left()


def test_a_link_that_is_cut_and_heals_loses_nothing(three: Hosts, started: Callable[..., Run]) -> None:
    """Longer than peers are presumed dead after, shorter than the connection of ssh lives."""
    run = started(three, "trainer.steps=60", slowest_s=3.0)
    run.until(lambda: run.steps() >= 3, alive=True)
    three.cut(1)
    run.until(lambda: "g0" not in run.routed(), alive=True)
    before = run.steps()
    run.until(lambda: run.steps() >= before + 2, alive=True)
    three.heal(1)
    run.until(lambda: "g0" in run.routed(), alive=True)
    run.finish()
    assert run.steps() == 60
    run.account()
    run.nothing_left()


def test_a_host_that_goes_takes_only_its_processes_and_is_used_again(three: Hosts, started: Callable[..., Run]) -> None:
    run = started(three, "trainer.steps=120", "launch.restarts=1", slowest_s=3.0)
    run.until(lambda: run.steps() >= 3, alive=True)
    three.cut(1)
    three.end_processes(1)
    run.until(lambda: "g0" not in run.routed(), alive=True)
    before = run.steps()
    run.until(lambda: run.steps() >= before + 2, alive=True)
    three.heal(1)
    three.boot(1)
    run.until(lambda: "g0" in run.routed(), alive=True)
    said = run.finish()
    assert f"{three.address(1)} can't be reached, g0 is restarted" in said
    assert run.steps() == 120
    run.account()


def test_a_generator_that_was_lost_ends_before_its_successor_starts(three: Hosts, started: Callable[..., Run]) -> None:
    """The connection of ssh breaks, and the link heals while the old generator's lease lasts: both would have its
    GPUs."""
    run = started(three, "trainer.steps=1000", "hosts.lease_s=60", slowest_s=3.0)
    run.until(lambda: run.steps() >= 3, alive=True)
    (first,) = run.generators(1)
    three.cut(1)
    run.until(lambda: "ssh: connect" in (run.folder / "logs" / "g0.log").read_text(), alive=True)
    assert run.generators(1) == {first}
    three.heal(1)
    at_once = []

    def succeeded() -> bool:
        there = run.generators(1)
        at_once.append(len(there))
        return bool(there - {first})

    run.until(succeeded, alive=True)
    assert max(at_once) == 1
    run.until(lambda: "g0" in run.routed(), alive=True)


def test_a_slow_link_delays_one_generator_and_no_other(three: Hosts, started: Callable[..., Run]) -> None:
    run = started(three, "trainer.steps=12")
    run.until(lambda: run.steps() >= 2, alive=True)
    three.slow(1, "3mbit")
    run.finish()
    assert run.steps() == 12
    assert set(run.samplers()) == {"g0", "g1"}
    run.account()


def test_processes_elsewhere_end_with_a_launcher_that_is_killed(three: Hosts, started: Callable[..., Run]) -> None:
    run = started(three, "trainer.steps=1000")
    run.until(lambda: run.steps() >= 2, alive=True)
    assert run.kill("launcher")
    run.wait()
    run.until_nothing_left()


def test_a_run_that_is_resumed_is_served_by_those_that_have_joined(three: Hosts, started: Callable[..., Run]) -> None:
    """The launcher is killed, and the next one has its address and join key before the hosts give it up: what they run
    has keys that are valid no more."""
    run = started(three, "trainer.steps=30", ssh=False, slowest_s=2.0)
    run.until(lambda: run.steps() >= 6, alive=True)
    assert run.kill("launcher")
    run.wait()
    run.resume()
    said = run.finish()
    assert "resuming from step" in said
    assert run.steps() == 30
    run.account()
    assert [each.wait(60) for each in run.joined] == [0] * len(run.joined)
    run.nothing_left()


STRANGER = """
import random, socket, sys
source = random.Random(0)
says = [
    b"", b"GET / HTTP/1.1\\r\\n\\r\\n", source.randbytes(64), source.randbytes(5000), bytes(64), b"\\xff" * 64,
    b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL" + bytes(48), (1 << 62).to_bytes(8, "little") * 8,
]
kept = []
for port in sys.argv[2:]:
    for said in says:
        try:
            stranger = socket.create_connection((sys.argv[1], int(port)), timeout=5)
            stranger.sendall(said)
            kept.append(stranger)
        except OSError:
            pass
"""
"""Says all of it at each port of a host, and keeps the connections open for a while."""


def test_strangers_at_every_port_change_nothing(three: Hosts, started: Callable[..., Run]) -> None:
    """Garbage, other protocols and silence, from another host, at each port of the trainer's host and of a generator's,
    while versions are sent: what has keys refuses and counts it; what has none belongs to one transfer or store."""
    run = started(three, "trainer.steps=40", slowest_s=2.0)
    run.until(lambda: run.steps() >= 2, alive=True)
    for _ in range(3):
        for number in (0, 1):
            open_to_all = {
                each for each in three.listening(number) if each[0] not in (three.address(number), "127.0.0.1")
            }
            assert not open_to_all, "something listens on more than its address"
            ports = [str(port) for address, port in three.listening(number) if address == three.address(number)]
            assert len(ports) >= (5 if number == 0 else 1)
            said = three.within(2, sys.executable, "-c", STRANGER, three.address(number), *ports)
            assert said.wait(120) == 0
    run.finish()
    assert run.steps() == 40
    assert set(run.samplers()) == {"g0", "g1"}
    refused = run.lines()[-1]["refused"]
    assert sum(refused.values()) >= 6, refused
    run.account()
