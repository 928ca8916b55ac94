"""Harm to the way of a version, with real processes, sockets and gloo; the publisher is this process.

In each case another, healthy generator gets every further version at once, no generator ever holds a mixture, and the
faulty one has the newest version again in the end.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from msgspec.structs import replace
from proxy import Harm, Proxy
from torch import nn

from inflight.bus import Listener
from inflight.config import BusConfig, PublishConfig
from inflight.weights.publish.events import Failure
from inflight.weights.publish.publisher import Publisher
from inflight.weights.publish.routes import routes
from inflight.weights.publish.states import ReplicaState
from inflight.weights.source import WeightSource

pytestmark = pytest.mark.faults

BUS = BusConfig(heartbeat_s=0.1, dead_after_s=2.0)
CONFIG = PublishConfig(
    bucket_bytes=4096, transfer_timeout_s=3, commit_timeout_s=2, supersede_after_s=1, retry_after_s=0.2
)
SLOW_RETRY = dataclasses.replace(CONFIG, retry_after_s=3)
"""Time to look at what is left after a failure."""
BOUND_S = 40.0
SHORT_S = 10.0
"""The longest that a publish may take with a faulty generator: less than any timeout's sum, far more than it is."""


class Harmed:
    """A publisher here, generators as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = self.front = f"ipc://{folder}/w"
        self.model = nn.Sequential(nn.Embedding(200, 16), nn.Linear(16, 200))
        self.fill(0)
        self.listener = Listener(self.endpoint, BUS)
        source = WeightSource(self.model, "float32")
        self.publisher = Publisher(source, self.listener, CONFIG, version=0, ranks={"g0": 1, "g1": 2})
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.proxy: Proxy | None = None

    def between(self, harm) -> None:
        """Generators that start from now on speak through a proxy."""
        self.front = f"ipc://{self.folder}/p"
        self.proxy = Proxy(self.front, self.endpoint, harm)

    def start(self, name: str, fault: str = "", *, front: str = "") -> None:
        world = str({"g0": 1, "g1": 2}[name])
        script = str(Path(__file__).parent / "rank.py")
        command = [sys.executable, script, front or self.front, name, world, *([fault] if fault else [])]
        with (self.folder / f"{name}.out").open("a") as out:
            self.processes[name] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)

    def publish(self, version: int, fill=None) -> None:
        self.fill(version, fill)
        started = time.monotonic()
        self.publisher.publish(version)
        assert time.monotonic() - started < SHORT_S, "the trainer does not wait for a generator with a fault"

    def fill(self, version: int, fill=None) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                fill(parameter) if fill else parameter.fill_(version)

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.publisher.states} {self.publisher.events[-5:]}"
            time.sleep(0.02)

    def has(self, **versions: int) -> bool:
        return versions.items() <= self.publisher.committed.items()

    def committed(self, **versions: int) -> None:
        self.until(lambda: self.has(**versions), f"{versions} committed")

    def start_again(self, name: str) -> None:
        """If it has ended or must end: as the launcher does."""
        if self.processes[name].poll() is not None or self.publisher.states[name][0] is ReplicaState.POISONED:
            self.processes[name].kill()
            self.processes[name].wait(10)
            self.start(name)

    def routed(self) -> set[str]:
        loop = self.publisher._loop
        with loop.changed:
            return set(routes(self.publisher.version, loop.protocol.replicas, CONFIG.max_behind).generators)

    def swaps(self, name: str) -> list[int]:
        """The versions after the trainer's first that a process has reported; each was whole on all its ranks."""
        told = []
        for line in (self.folder / f"{name}.out").read_text().splitlines():
            version, _, held = line.partition(" ")
            if version.isdecimal():
                assert ast.literal_eval(held) == [[float(version)]] * {"g0": 1, "g1": 2}[name], line
                told.append(int(version))
        return [version for version in told if version > 0]

    def live(self, name: str) -> str:
        """What a process holds, byte by byte: `VERSION SHA-256`."""
        out = self.folder / f"{name}.out"
        told = len(out.read_text().splitlines())
        os.kill(self.processes[name].pid, signal.SIGUSR1)

        def lines() -> list[str]:
            return [line[5:] for line in out.read_text().splitlines()[told:] if line.startswith("live ")]

        self.until(lines, "its answer")
        return lines()[0]

    def whole(self, name: str, version: int) -> str:
        """What `live` says of a generator whose ranks hold the model as it is here."""
        held = [tensor.detach().numpy().tobytes() for _, tensor in sorted(self.model.named_parameters())]
        return f"{version} {hashlib.sha256(b''.join(held * {'g0': 1, 'g1': 2}[name])).hexdigest()}"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)
        self.publisher.close()
        if self.proxy is not None:
            self.proxy.close()
        self.listener.close()


@pytest.fixture
def harmed(tmp_path):
    made = Harmed(tmp_path)
    yield made
    made.close()


PHASES = ("begin", "receive", "build", "ready", "swap", "answer")


@pytest.mark.parametrize("phase", PHASES)
def test_a_generator_killed_in_a_phase_is_skipped_and_restarted(harmed, phase):
    harmed.start("g0")
    harmed.start("g1", f"{phase}:kill")
    harmed.publisher.wait_joined(BOUND_S)
    harmed.publish(1)
    harmed.committed(g0=1, g1=1)
    harmed.publish(2)
    harmed.committed(g0=2)
    assert harmed.processes["g1"].wait(BOUND_S) == -signal.SIGKILL
    harmed.publish(3)
    harmed.committed(g0=3)
    harmed.until(lambda: harmed.routed() == {"g0"}, "its leaving")
    assert "g1" not in harmed.publisher.committed
    harmed.start("g1")  # holds no version
    harmed.committed(g0=3, g1=3)
    assert harmed.routed() == {"g0", "g1"}
    assert (harmed.swaps("g0"), harmed.swaps("g1")[-1]) == ([1, 2, 3], 3)


@pytest.mark.parametrize("phase", ["receive", "build", "answer"])
def test_a_suspended_generator_delays_no_other_and_catches_up(harmed, phase):
    harmed.start("g0")
    harmed.start("g1", f"{phase}:stop")
    harmed.publisher.wait_joined(BOUND_S)
    harmed.publish(1)
    harmed.committed(g0=1, g1=1)
    process = psutil.Process(harmed.processes["g1"].pid)
    for version in (2, 3, 4):
        harmed.publish(version)
        harmed.committed(g0=version)
    harmed.until(lambda: process.status() == psutil.STATUS_STOPPED, "its stop")
    harmed.until(lambda: harmed.routed() == {"g0"}, "its leaving")
    os.kill(process.pid, signal.SIGCONT)
    harmed.committed(g0=4, g1=4)
    harmed.until(lambda: harmed.routed() == {"g0", "g1"}, "its return")
    assert harmed.swaps("g0") == [1, 2, 3, 4]
    assert harmed.swaps("g1") == sorted(set(harmed.swaps("g1")))


@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "truncate", "corrupt"])
def test_corrupted_control_messages_change_no_weights(harmed, kind):
    harm = Harm(kind, 0.15, seed=7)
    harmed.start("g0")
    harmed.between(harm)
    harmed.start("g1")
    harmed.publisher.wait_joined(BOUND_S, at_least=1)
    version = 0
    while sum(harm.done.values()) < 12:
        version += 1
        assert version < 60
        harmed.publish(version)
        harmed.committed(g0=version)
        harmed.start_again("g1")
        time.sleep(0.3)
    harm._share = 0.0
    harmed.publish(version + 1)
    harmed.until(lambda: harmed.start_again("g1") or harmed.has(g0=version + 1, g1=version + 1), "the last version")
    assert harmed.swaps("g0") == list(range(1, version + 2))
    assert harmed.swaps("g1")[-1] == version + 1


class HarmedSender:
    """Sends other buckets than it should, once: real gloo on both sides, wrong bytes between."""

    def __init__(self, inner, kind, done):
        self._inner, self._kind, self._done = inner, kind, done
        self.rendezvous, self.follows = inner.rendezvous, inner.follows

    def send(self, buffer, buckets, packed):
        if self._done:
            self._inner.send(buffer, buckets)
            return
        self._done.append(self._kind)
        first, second, third, *rest = buckets
        match self._kind:
            case "corrupt":
                buffer = buffer.clone()
                buffer[second.offset + 100] ^= 4
            case "truncate":
                second = replace(second, nbytes=second.nbytes // 2)
            case "drop":
                rest = rest[:-1]
            case "duplicate":
                third = second
            case "repeat":
                rest = [third, *rest]
            case "reorder":
                second, third = third, second
        self._inner.send(buffer, [first, second, third, *rest])

    def close(self):
        self._inner.close()


def harm_buckets(harmed, kind) -> list[str]:
    """Both generators hold version 1, and g1 is sent corrupt buckets as soon as the returned list is empty."""
    done: list[str] = ["not yet"]
    channels = harmed.publisher._loop.session.channels
    make = channels.make_sender
    channels.make_sender = lambda name, world_size, of: (
        HarmedSender(make(name, world_size, of), kind, done) if name == "g1" else make(name, world_size, of)
    )
    harmed.start("g0")
    harmed.start("g1")
    harmed.publisher.wait_joined(BOUND_S)
    harmed.publish(1)
    harmed.committed(g0=1, g1=1)
    return done


HARMS = {
    "corrupt": "verify",
    "duplicate": "verify",
    "reorder": "verify",
    "truncate": "verify",
    "drop": "receive",
}


@pytest.mark.parametrize("kind", HARMS)
def test_harmed_buckets_are_refused_and_the_version_comes_whole_later(harmed, kind):
    done = harm_buckets(harmed, kind)
    before = harmed.live("g1")
    harmed.publisher._loop.session.config = SLOW_RETRY
    done.clear()
    started = time.monotonic()
    harmed.publish(2, lambda parameter: parameter.copy_(torch.randn_like(parameter)))
    failures = lambda: [e for e in harmed.publisher.events if isinstance(e, Failure)]  # noqa: E731
    harmed.until(failures, "refusing")
    assert time.monotonic() - started < CONFIG.transfer_timeout_s + SHORT_S
    assert [(e.generator, e.version, e.phase) for e in failures()] == [("g1", 2, HARMS[kind])]
    assert harmed.live("g1") == before, "not a byte of what is live has changed"
    assert harmed.publisher.committed["g1"] == 1
    harmed.committed(g0=2, g1=2)  # by the next attempt
    assert harmed.live("g1") == harmed.whole("g1", 2)
    assert harmed.live("g0") == harmed.whole("g0", 2)
    assert done == [kind]
    assert len(failures()) == 1


def test_a_bucket_too_many_ends_the_generator_which_comes_back(harmed):
    """Gloo ends a process that is sent more bytes than it waits for. Nothing is claimed for it then."""
    done = harm_buckets(harmed, "repeat")
    done.clear()
    harmed.publish(2)
    harmed.committed(g0=2)
    assert harmed.processes["g1"].wait(BOUND_S) == -signal.SIGABRT
    harmed.until(lambda: "g1" not in harmed.publisher.committed, "its leaving")
    harmed.publish(3)
    harmed.committed(g0=3)
    harmed.start("g1")
    harmed.committed(g0=3, g1=3)
    assert harmed.swaps("g0") == [1, 2, 3]
    assert harmed.swaps("g1") == [1, 3]


def test_a_partition_heals(harmed):
    harmed.start("g0")
    harmed.between(lambda frame, down: [frame])
    harmed.start("g1")
    harmed.publisher.wait_joined(BOUND_S)
    harmed.publish(1)
    harmed.committed(g0=1, g1=1)
    harmed.proxy.cut.set()
    harmed.until(lambda: harmed.publisher.states["g1"][0] is ReplicaState.ABSENT, "noticing it")
    harmed.publish(2)
    harmed.committed(g0=2)
    assert harmed.routed() == {"g0"}
    harmed.proxy.cut.clear()
    harmed.committed(g0=2, g1=2)
    harmed.until(lambda: harmed.routed() == {"g0", "g1"}, "its return")
    assert harmed.swaps("g1") == [1, 2]


def test_a_publisher_lost_during_a_transfer_leaves_live_weights_unchanged_and_its_successor_continues(harmed):
    """The rank is stopped after the first bucket, so that nothing of the farewell reaches it in time."""
    harmed.start("g0", "receive:stop")
    harmed.publisher.wait_joined(BOUND_S, at_least=1)
    harmed.publish(1)
    harmed.committed(g0=1)
    before = harmed.live("g0")
    harmed.publish(2)
    process = psutil.Process(harmed.processes["g0"].pid)
    harmed.until(lambda: process.status() == psutil.STATUS_STOPPED, "the first bucket")
    harmed.publisher.close()
    harmed.listener.close()
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(BUS.dead_after_s + 0.5)
    assert harmed.swaps("g0") == [1]
    assert harmed.live("g0") == before
    harmed.listener = Listener(harmed.endpoint, BUS)
    harmed.fill(1)
    source = WeightSource(harmed.model, "float32")
    harmed.publisher = Publisher(source, harmed.listener, CONFIG, version=1, ranks={"g0": 1})
    harmed.committed(g0=1)
    harmed.publish(2)
    harmed.committed(g0=2)
    assert harmed.swaps("g0") == [1, 1, 2], "the next publisher's version 1 may be other weights: it is sent"


def test_a_hundred_joins_and_leaves_cost_nothing(harmed):
    """Of light ranks in this process, while another generator gets versions; files, threads and memory stay."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
    from fake_generator import FakeGenerator

    joins = int(os.environ.get("INFLIGHT_JOINS", "100"))
    harmed.start("g0")
    harmed.publisher.wait_joined(BOUND_S, at_least=1)
    here, version, marks = psutil.Process(), 0, []
    for number in range(joins):
        generator = FakeGenerator(harmed.endpoint, "g1", 2, bus=BUS).start()
        mine = generator.incarnation
        members = harmed.publisher._loop.protocol.membership.replicas["g1"].members
        harmed.until(lambda mine=mine, members=members: members.incarnation == mine, "hello")
        harmed.committed(g1=version)
        assert generator.version == version
        if number % 10 == 0:
            version += 1
            harmed.publish(version)
            harmed.committed(g0=version, g1=version)
        generator.close()
        if number in (joins // 5, joins - 1):
            time.sleep(1)
            marks.append((here.num_fds(), threading.active_count(), here.memory_info().rss))
    print(f"{joins} joins: file descriptors, threads, bytes after a fifth of them and at the end: {marks}")
    (fds, threads, rss), (fds_end, threads_end, rss_end) = marks
    assert fds_end <= fds + 20
    assert threads_end <= threads + 10
    assert rss_end - rss < (8 << 20) + joins * (100 << 10)
    assert harmed.swaps("g0") == list(range(1, version + 1))
