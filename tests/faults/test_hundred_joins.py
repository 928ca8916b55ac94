"""A hundred hosts join a run over real sockets, with real keys, while versions are published; some leave, some come
back: four processes of 25 hosts each, with generators that have no engine (crowd.py)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from joining_hosts import KEY, free_ports
from run_folders import written_run

from inflight.bus import Listener
from inflight.config import RunConfig
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.launcher.guests import Guests
from inflight.processes import Processes
from inflight.starters.joining import VARIABLE, JoinStarter
from inflight.weights.publish.events import Failure
from inflight.weights.publish.publisher import Publisher
from inflight.weights.source import WeightSource

pytestmark = pytest.mark.faults

PROCESSES, EACH, CONFIGURED = 4, 25, 2
HOSTS = PROCESSES * EACH
BOUND_S = 900.0
CROWD = Path(__file__).parent / "crowd.py"


class Model(torch.nn.Module):
    """Two parameters, which each version changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(40, 8))
        self.b = torch.nn.Parameter(torch.zeros(7))

    def set(self, version: int) -> None:
        with torch.no_grad():
            self.a.copy_(torch.arange(320.0).view(40, 8) + version)
            self.b.fill_(float(version))

    def digest(self) -> str:
        named = dict(self.named_parameters())
        return hashlib.sha256(b"".join(named[name].detach().numpy().tobytes() for name in sorted(named))).hexdigest()


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    limits = [f"generator.count={CONFIGURED}", f"hosts.most_generators={HOSTS}"]
    patience = ["publish.transfer_timeout_s=120", "publish.commit_timeout_s=60", "bus.dead_after_s=120"]
    joining = ["network.bind=127.0.0.1", "hosts.starter=join"]
    made = compose("tiny", [f"run_dir={tmp_path}/run", *joining, *limits, *patience])
    return written_run(made, tmp_path / "run", port=free_ports())


@pytest.fixture
def crowds() -> Iterator[Callable[[str], list[subprocess.Popen[str]]]]:
    started: list[subprocess.Popen[str]] = []

    def start(address: str) -> list[subprocess.Popen[str]]:
        environment = os.environ | {VARIABLE: KEY, "OMP_NUM_THREADS": "1"}
        for number in range(PROCESSES):
            command = [sys.executable, str(CROWD), address, str(number * EACH), str(EACH)]
            started.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        return started

    yield start
    for each in started:
        each.kill()
        each.communicate(timeout=60)


def held(crowd: list[subprocess.Popen[str]]) -> dict[str, tuple[int, str]]:
    """What every generator says that it holds."""
    found: dict[str, tuple[int, str]] = {}
    for each in crowd:
        each.stdin.write("\n")
        each.stdin.flush()
    for each in crowd:
        line = each.stdout.readline()
        while not line.startswith("{"):  # what is printed beside
            assert line, f"a process has ended with code {each.wait(60)}"
            line = each.stdout.readline()
        found |= {name: (version, digest) for name, (version, digest) in json.loads(line).items()}
    return found


def test_a_hundred_join_and_leave_and_the_books_of_their_versions_are_right(
    run: RunConfig, crowds: Callable[[str], list[subprocess.Popen[str]]]
) -> None:
    model = Model()
    model.set(0)
    starter = JoinStarter(run, {VARIABLE: KEY})
    guests = Guests(run, starter)
    ended: list[str] = []
    left: list[str] = []
    with (
        Listener(run.listening("weights"), run.bus) as listener,
        Processes(1.0, elsewhere=starter) as processes,
    ):
        publisher = Publisher(
            WeightSource(model, "float32"),
            listener,
            run.publish,
            version=0,
            ranks=dict.fromkeys(run.generator_names(), 1),
            network=run.network,
            elastic=True,
            guest_ranks=1,
        )
        for command in usual_commands(run):
            if command.kind == "generator":
                processes.start(command)

        def tend() -> None:
            """What the launcher does."""
            for each in processes.ended():
                ended.append(each.command.name)
                if guests.left(each) is None:
                    processes.start(each.command)  # a configured one waits for the next host
                else:
                    left.append(each.command.name)
            for command in guests.due():
                processes.start(command)

        crowd = crowds(f"127.0.0.1:{run.bus.port + 5}")
        tenth = HOSTS // 10  # so many leave, and so many end their first generator
        staying = HOSTS - tenth
        version, began = 0, time.monotonic()
        while version < 6 or len(publisher.committed) != staying or len(ended) < 2 * tenth:
            assert time.monotonic() - began < BOUND_S, (version, len(publisher.committed), ended)
            tend()
            time.sleep(0.2)
            if len(publisher.committed) > version * staying // 8:  # versions are published while they join
                version += 1
                model.set(version)
                publisher.publish(version)
        missed = publisher.flush(BOUND_S)
        books = publisher.committed
        assert {name: why for name, why in missed.items() if name in books} == {}
        assert set(books.values()) == {version}
        assert held(crowd) == {name: (version, model.digest()) for name in books}
        assert (len(books), len(ended)) == (staying, 2 * tenth)
        assert not set(left) & set(books), "no name is given twice"
        failed = {event.generator for event in publisher.events if isinstance(event, Failure)}
        assert failed <= set(ended), "a transfer fails only where a generator leaves in the middle of it"
        assert not listener.refusals.counts["key not allowed"]
        publisher.close()
