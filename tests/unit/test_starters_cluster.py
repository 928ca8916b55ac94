"""Processes on nodes of a cluster: the launcher's side and the node's, without Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.config import ConfigError
from inflight.config.effect import require_effect
from inflight.exits import STOPPED
from inflight.launcher import devices
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.starters import ray_handle
from inflight.starters.base import UNREACHABLE, Command
from inflight.starters.ray_handle import NodeGone, RayHandle, RayLeases
from inflight.starters.ray_node import OUTPUT_AT_MOST, RayNodeProcess
from inflight.starters.ray_placement import NodeShare, no_room, node_of, require_reserved, shares_of

LIMIT_S = 30.0
ON_RAY = ("network.bind=10.0.0.1", "hosts.starter=ray", "generator.count=2")

# --- the node's side ---

CHILD = """
import os, sys
first = os.read(0, 5)
assert first == b"PARCE", first
assert not [name for name in os.environ if name.startswith("RAY_")]
print("has its parcel", flush=True)
renewed = 0
while more := os.read(0, 4096):
    renewed += more.count(b".")
    if renewed >= 2:
        os.write(1, b"x" * {noise})
        print("renewed twice", flush=True)
        renewed = -1000
    if b"!" in more:
        sys.exit(7)
print("the input has ended", flush=True)
sys.exit(5)
"""


@pytest.fixture
def node_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayNodeProcess]]:
    """In place of `inflight.hosted`, a process that tells what comes through its input."""
    monkeypatch.setenv("RAY_JOB_ID", "1")
    made: list[RayNodeProcess] = []

    def make(noise: int = 0, parcel: bytes = b"PARCEL") -> RayNodeProcess:
        program = tmp_path / "child.py"
        program.write_text(CHILD.format(noise=noise))
        made.append(RayNodeProcess(parcel, f"{sys.executable} {program}"))
        return made[-1]

    yield make
    for each in made:
        each._child.kill()
        each._child.wait(LIMIT_S)


def taken(node_process: RayNodeProcess, ends: Callable[[bytes, int | None], object]) -> tuple[bytes, int | None]:
    """All output until a condition on it and the exit code holds."""
    said, deadline = b"", time.monotonic() + LIMIT_S
    while True:
        output, code = node_process.exchange()
        said += output
        if ends(said, code):
            return said, code
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


def test_the_child_gets_parcel_and_renewals_and_its_output_and_exit_code_come_back(node_process) -> None:
    there = node_process()
    taken(there, lambda said, _: b"renewed twice\n" in said)  # with its end: an unbuffered child writes that apart
    there.stop()
    said, code = taken(there, lambda _, code: code is not None)
    assert (said, code) == (b"the input has ended\n", 5)


def test_a_parcel_that_is_larger_than_a_pipe_is_handed_over_all_the_same(node_process) -> None:
    there = node_process(parcel=b"PARCEL" + b"-" * (1 << 18) + b"!")
    _, code = taken(there, lambda _, code: code is not None)
    assert code == 7


def test_output_that_nobody_takes_is_kept_up_to_a_bound(node_process) -> None:
    there = node_process(noise=2 * OUTPUT_AT_MOST)
    for _ in range(2):
        while there._writer.is_alive():
            time.sleep(0.01)
        there._renew()
    deadline = time.monotonic() + LIMIT_S
    while there._dropped < OUTPUT_AT_MOST:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    said, _ = taken(there, lambda said, _: b"are lost" in said)
    assert OUTPUT_AT_MOST <= len(said) < OUTPUT_AT_MOST + 100


# --- the launcher's side ---


class Node:
    """What a node answers, in order; the last answer is repeated."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.done: list[str] = []

    def ask(self) -> None:
        self.done.append("ask")

    def answer(self) -> tuple[bytes, int | None] | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self.done.append("stop")

    def end(self) -> None:
        self.done.append("end")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only the test moves."""
    now = [100.0]
    monkeypatch.setattr(ray_handle.time, "monotonic", lambda: now[0])
    return now


def handle(node: Node, tmp_path: Path) -> RayHandle:
    command = Command("g0", "generator", ["true"], tmp_path / "logs" / "g0.log", host="n1")
    return RayHandle(command, node, lease_s=10.0)


def polled(of: RayHandle, clock: list[float], times: int) -> list[int | None]:
    codes = []
    for _ in range(times):
        codes.append(of.poll())
        clock[0] += 1.0
    return codes


def test_output_goes_to_the_log_and_the_exit_code_ends_it(clock, tmp_path) -> None:
    node = Node(None, (b"one\n", None), (b"two\n", 3))
    assert polled(handle(node, tmp_path), clock, 4) == [None, None, 3, 3]
    assert (tmp_path / "logs" / "g0.log").read_text() == "one\ntwo\n"
    assert node.done == ["ask", "ask", "end"]


def test_a_process_waits_for_its_node_without_a_limit_but_not_for_an_answer_of_it(clock, tmp_path) -> None:
    node = Node(*[None] * 100, (b"", None), None)
    waiting = handle(node, tmp_path)
    assert polled(waiting, clock, 101) == [None] * 101
    assert polled(waiting, clock, 11)[-1] == UNREACHABLE
    assert "g0 is lost: no answer for 10 s (hosts.lease_s)" in (tmp_path / "logs" / "g0.log").read_text()
    assert node.done[-1] == "end"


def test_a_node_that_is_gone_is_unreachable_and_one_that_falters_is_asked_again(clock, tmp_path) -> None:
    node = Node((b"", None), ConnectionError(), (b"", None), NodeGone("its raylet has ended"))
    assert polled(handle(node, tmp_path), clock, 4) == [None, None, None, UNREACHABLE]
    assert "g0 is lost: its raylet has ended" in (tmp_path / "logs" / "g0.log").read_text()
    faltering = handle(Node((b"", None), ConnectionError()), tmp_path)
    assert polled(faltering, clock, 13)[-1] == UNREACHABLE


def test_a_process_is_asked_to_end_and_one_that_has_no_node_yet_is_not_started(clock, tmp_path) -> None:
    node = Node((b"", None), (b"", STOPPED))
    stopped = handle(node, tmp_path)
    polled(stopped, clock, 1)
    stopped.stop()
    assert polled(stopped, clock, 1) == [STOPPED]
    assert node.done == ["ask", "ask", "stop", "end"]
    waiting = Node(None)
    never = handle(waiting, tmp_path)
    never.stop()
    assert never.poll() == STOPPED
    assert waiting.done == ["ask", "end"]


def test_leases_are_renewed_while_the_launcher_is_blocked(tmp_path) -> None:
    """Nothing of the launcher's polls here."""
    node, done = Node((b"", None)), Node((b"last words\n", 3))
    leases = RayLeases()
    try:
        living, ended = leases.add(handle(node, tmp_path)), leases.add(handle(done, tmp_path))
        deadline = time.monotonic() + LIMIT_S
        while node.done.count("ask") < 3 or done.done != ["ask", "end"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        leases.close()
    assert not leases._thread.is_alive()
    assert (living.poll(), ended.poll()) == (None, 3)
    assert (tmp_path / "logs" / "g0.log").read_text() == "last words\n"


def test_a_log_that_can_not_be_written_ends_no_process(clock, tmp_path) -> None:
    (tmp_path / "logs").write_text("no folder")
    assert polled(handle(Node((b"one", None), (b"two", 3)), tmp_path), clock, 2) == [None, 3]


# --- what goes where ---


def test_shares_are_those_of_the_ranks_and_actors_take_no_gpu(tmp_path) -> None:
    options = ["generator.tensor_parallel_size=2", "generator.threads=3", "rollout.actors=2"]
    config = compose("tiny", [f"run_dir={tmp_path}/run", *ON_RAY, *options])
    assert shares_of(config, gpus=True) == {
        "g0": NodeShare(6, 2),
        "g1": NodeShare(6, 2),
        "a0": NodeShare(1, 0),
        "a1": NodeShare(1, 0),
    }
    assert NodeShare(6, 2).bundle() == {"CPU": 6, "GPU": 2}
    assert shares_of(config, gpus=False)["g0"].bundle() == {"CPU": 6}
    said = str(no_room(shares_of(config, gpus=True), {"CPU": 4.0, "memory": 1e9}, 60.0))
    assert "Ray has not placed g0, g1, a0, a1 within 60 s" in said
    assert "they take 14 CPU, 4 GPU, and no process can be split over nodes; the cluster has 4 CPU" in said


def test_without_names_ray_chooses_the_nodes_of_generators_and_actors(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(devices, "available", list)
    config = compose("tiny", [f"run_dir={tmp_path}/run", *ON_RAY])
    assert {each.name for each in usual_commands(config) if each.host} == {"g0", "g1", "a0"}
    config = compose("tiny", [f"run_dir={tmp_path}/run", *ON_RAY, "hosts.names=[n1]"])
    assert {each.name: each.host for each in usual_commands(config) if each.host} == {"g0": "n1", "g1": "n1"}


NODES = [
    {"NodeID": "aa", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "one", "Alive": True},
    {"NodeID": "bb", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": False},
    {"NodeID": "cc", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": True},
    {"NodeID": "dd", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "four", "Alive": True},
]


def test_a_node_has_three_names_and_one_that_is_back_has_another_id() -> None:
    assert [node_of(name, NODES) for name in ("aa", "one", "10.0.0.2", "two", "bb", "")] == [
        "aa",
        "aa",
        "cc",
        "cc",
        None,
        None,
    ]
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.1' is the name of 2 nodes of Ray's, use their ids: aa, dd"):
        node_of("10.0.0.1", NODES)


def test_the_trainer_uses_the_gpus_that_ray_reserves_for_it() -> None:
    require_reserved(["1", "0"], ["0", "1"])
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES=2,3 for the launcher"):
        require_reserved(["2", "3"], ["0", "1"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["hosts.starter=ray"], "hosts.starter='ray' is not allowed: local, or with network.bind"),
        ([*ON_RAY, "hosts.ray='ray://10.0.0.1:10001'"], "auto, or the IP address and the port of a cluster"),
        ([*ON_RAY, "hosts.ray_placement_timeout_s=0"], "hosts.ray_placement_timeout_s=0"),
        (["hosts.ray='10.0.0.1:6379'"], "hosts.ray is set and has no effect: hosts.starter is not ray"),
        ([*ON_RAY, "hosts.ssh=-v"], "hosts.ssh is set and has no effect: hosts.starter is not ssh"),
        ([*ON_RAY, "hosts.names=[n1]", "hosts.ray_placement_timeout_s=9"], "without hosts.names and hosts.actors"),
    ],
)
def test_options_of_ray_that_can_not_be_used_are_refused(tmp_path, options, said) -> None:
    with pytest.raises(ConfigError) as caught:
        require_effect(compose("tiny", [f"run_dir={tmp_path}/run", *options]))
    assert said in str(caught.value)
