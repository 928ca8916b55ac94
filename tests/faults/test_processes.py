"""Faults of one process of a run: the others continue or end, within bounds, and every group is accounted for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq
from run import free_port

from inflight import config as configuration
from inflight.bus import Link, keys, make_keys
from inflight.exits import STOPPED
from inflight.messages import ActorBye, GroupAck, GroupDone, GroupFailed, encode
from inflight.rollout.ledger import MAX_TRIES
from inflight.rollout.stream import Reader

pytestmark = pytest.mark.faults

SHORT = "trainer.steps=14"
KEEP_OLD = "gate.max_token_lag=1000"


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def all_is_trained(run, steps=14):
    """Every question once, in the order of no one, and no group lost from the books."""
    assert run.wait() == 0, run.logs()
    books = run.account()
    assert run.trained() == run.written() == list(range(2 * steps)), run.logs()
    assert (books.settled_below, books.settled_beyond, books.dropped) == (2 * steps, [], {})
    assert run.aborted() == 0
    return books


@pytest.mark.parametrize("victim", ["a0", "g0"])
def test_a_killed_helper_is_started_again(make_run, victim):
    run = make_run(SHORT, KEEP_OLD).start()
    run.until(lambda: run.steps() >= 3)
    assert run.kill(victim)
    books = all_is_trained(run)
    assert f"{victim} was ended by SIGKILL; it is restarted in 0.2 s (1 of 3)" in run.output
    if victim == "a0":
        assert books.failed.get("actor lost", 0) > 0
    else:
        assert set(books.failed) <= {"connection lost", "actor lost"}


def test_several_actors_share_the_questions_and_a_resume_may_have_another_number_of_them(make_run):
    """Over TCP, where each needs a key of its own; one is killed, then the launcher."""
    keyed = ("bus.address=127.0.0.1", f"bus.port={free_port()}")
    several = ("trainer.steps=30", KEEP_OLD, "gate.max_lag=2", "rollout.concurrency=2", *keyed)
    run = make_run(*several).start("rollout.actors=2")
    run.until(lambda: run.steps() >= 3, alive=True)
    assert run.kill("a1")
    run.until(lambda: "actor lost" in run.lines()[-1]["groups_failed"], alive=True)
    run.kill("launcher")
    assert run.wait() != 0
    all_is_trained(run.start("resume=true", "rollout.actors=3"), 30)
    assert "rollout.actors=3" in run.output
    assert {path.stem for path in (run.folder / "logs").glob("a*.log")} == {"a0", "a1", "a2"}


def test_a_generator_that_is_asked_to_end_leaves_at_once_and_is_started_again(make_run):
    """Its silence would be noticed after the run only."""
    patient = ("bus.dead_after_s=1000", "launch.restart_delay_s=2")
    run = make_run("trainer.steps=60", KEEP_OLD, "generator.count=2", *patient).start()
    run.until(lambda: set(run.routed()) == {"g0", "g1"}, alive=True)
    assert run.kill("g1", signal.SIGTERM)
    run.until(lambda: set(run.routed()) == {"g0"}, alive=True)
    all_is_trained(run, 60)
    assert "g1 ended with code 143; it is restarted in 2 s (1 of 3)" in run.output


@pytest.mark.parametrize("who", ["trainer", "reward", "generator"])
def test_who_is_slow_fills_bounded_memory(make_run, monkeypatch, who):
    """However many groups an actor may ask for at once: no more are under way or wait than the lag allows."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.setenv("STAND_IN_SLOWEST_S", "3" if who == "generator" else "0.01")
    slow = {"trainer": ["trainer.objective.name=slow:objective"], "reward": ["task.name=slow:Slow"]}.get(who, [])
    run = make_run("trainer.steps=8", KEEP_OLD, "rollout.concurrency=64", *slow).start()
    all_is_trained(run, 8)
    config, lines = configuration.load(run.folder), run.lines()
    held = [line["groups_in_flight"] + line["buffer"] for line in lines]
    assert max(held) <= config.capacity
    (most,) = re.findall(r"at most (\d+) requests at once", (run.folder / "logs" / "g0.log").read_text())
    assert int(most) <= config.capacity * config.rollout.group_size
    assert max(held) >= config.capacity - config.trainer.groups_per_step, "it was the slow one that was waited for"


def test_one_of_two_generators_is_enough(make_run):
    """g1 dies until it is given up for now; its samples are asked of g0, nothing is lost."""
    run = make_run(SHORT, KEEP_OLD, "generator.count=2", "launch.restart_delay_s=60").start()
    run.until(lambda: run.steps() >= 2)
    assert run.kill("g1")
    books = all_is_trained(run)
    assert sum(books.failed.values()) <= MAX_TRIES * 6


def test_a_generator_that_is_given_up_ends_the_run_which_can_be_resumed(make_run):
    run = make_run(SHORT, KEEP_OLD, "launch.restarts=0").start()
    run.until(lambda: run.steps() >= 3)
    assert run.kill("g0")
    assert run.wait() == 1
    assert "g0 was ended by SIGKILL" in run.output
    assert "resume=true" in run.output
    all_is_trained(run.resume())


def test_a_suspended_actor_that_was_presumed_dead_rejoins(make_run):
    """SIGSTOP for longer than `dead_after_s`: its groups are given back; what it delivers late is taken once."""
    run = make_run(SHORT, KEEP_OLD, "bus.dead_after_s=2").start()
    run.until(lambda: run.steps() >= 3)
    assert run.kill("a0", signal.SIGSTOP)
    time.sleep(4)
    at = run.steps()
    time.sleep(1)
    assert run.steps() == at, "no other actor samples"
    assert run.kill("a0", signal.SIGCONT)
    books = all_is_trained(run)
    assert books.failed.get("actor lost", 0) > 0


def test_a_suspended_trainer_that_was_presumed_dead_continues(make_run):
    """SIGSTOP for longer than `dead_after_s`: the actor ends and is started again, the generator joins anew."""
    run = make_run(SHORT, KEEP_OLD, "bus.dead_after_s=2").start()
    run.until(lambda: run.steps() >= 3)
    before = run.process("g0")
    assert run.kill("trainer", signal.SIGSTOP)
    run.until(lambda: "the buffer is gone" in (run.folder / "logs" / "a0.log").read_text(), alive=True)
    assert run.kill("trainer", signal.SIGCONT)
    all_is_trained(run)
    assert re.search(r"a0 ended with code \d+; it is restarted", run.output), run.output
    assert "g0 ended" not in run.output
    assert not before.is_running()


def test_sigterm_to_the_trainer_is_no_success_and_loses_no_step(make_run):
    run = make_run(SHORT, KEEP_OLD, "trainer.checkpoint_every=0").start()
    run.until(lambda: run.steps() >= 3)
    assert run.kill("trainer", signal.SIGTERM)
    assert run.wait() == STOPPED
    assert "trainer: stopped by SIGTERM after step" in run.output
    assert run.saved().step == run.steps() >= 3
    all_is_trained(run.resume())


def test_a_full_disk_stops_the_run_with_its_checkpoint_whole(make_run):
    """As if full: no file may grow beyond a size that the rollouts reach after some steps."""
    run = make_run(SHORT, KEEP_OLD, "audit.keep_versions=false").start()
    run.until(lambda: run.process("trainer") is not None)
    run.until(lambda: run.steps() >= 3)
    rollouts = (run.folder / "rollouts" / "rollouts.msgpack").stat().st_size
    with contextlib.suppress(Exception):
        resource.prlimit(run.process("trainer").pid, resource.RLIMIT_FSIZE, (rollouts, rollouts))
    assert run.wait() == 1
    assert "trainer ended with code 1" in run.output or "SIGXFSZ" in run.output
    step = run.saved().step
    assert step >= 2
    assert [path.name for path in (run.folder / "checkpoints").iterdir() if "partial" in path.name] == []
    all_is_trained(run.resume())


def test_strangers_on_the_sockets_change_nothing(make_run):
    """Random bytes, other schemas, answers to no request, under names of their own and of an actor's kind."""
    run = make_run(SHORT, KEEP_OLD).start()
    run.until(lambda: run.steps() >= 1)
    config = configuration.load(run.folder)
    repeated = GroupDone(group=next(iter(Reader(run.folder / "rollouts" / "rollouts.msgpack"))))
    context = zmq.Context()
    for service in ("weights", "rollouts", "status"):
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.IDENTITY, b"a7")
        raw.connect(config.endpoint(service))
        for frame in (
            os.urandom(100),
            b"\x07" + encode(GroupAck(group_id="q0"))[1:],
            encode(ActorBye(reason="x")),
            encode(GroupFailed(group_id="q3", reason="x", again=False)),
            encode(repeated),
        ):
            raw.send(frame)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as scanner:
            scanner.connect(config.endpoint(service).removeprefix("ipc://"))
            scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
    books = all_is_trained(run)
    assert books.ignored.get("repeat", 0) + books.ignored.get("not granted", 0) == 2, "the group again, and q3"
    context.destroy(linger=0)
    log = (run.folder / "logs" / "trainer.log").read_text()
    assert "refused from a7: no valid message" in log


class Recorder(threading.Thread):
    """Passes one connection on to a port and keeps what the client says."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._back, self.said = port, b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.start()

    def run(self) -> None:
        client, _ = self._listening.accept()
        with client, socket.create_connection(("127.0.0.1", self._back)) as server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    self.said += data if ready is client else b""
                    (server if ready is client else client).sendall(data)


def test_over_tcp_with_keys_strangers_change_nothing(make_run, tmp_path):
    """A recorded conversation, byte for byte; a wrong key; a foreign schema with the right one; random bytes."""
    run = make_run("trainer.steps=40", KEEP_OLD, "bus.address=127.0.0.1", f"bus.port={free_port()}").start()
    run.until(lambda: run.steps() >= 1, alive=True)
    config = configuration.load(run.folder)
    weights, rollouts = config.endpoint("weights"), config.endpoint("rollouts")

    def told(where: str, what: str) -> None:
        log = run.folder / "logs" / "trainer.log"
        run.until(lambda: re.search(f"{where}: refused from .*{what}", log.read_text()) is not None, alive=True)

    recorder = Recorder(port_of(rollouts))
    with Link(f"tcp://127.0.0.1:{recorder.port}", "a0.spy", config.bus) as spy:
        spy.send(GroupFailed(group_id="q999999", reason="x", again=False))
        assert spy.receive(20) == GroupAck(group_id="q999999")
    with socket.create_connection(("127.0.0.1", port_of(rollouts))) as again:
        again.sendall(recorder.said)
        told(rollouts, "handshake")

    make_keys(tmp_path / "keys", ["a0"])
    (tmp_path / "keys" / "listener.key").write_bytes((run.folder / "keys" / "listener.key").read_bytes())
    with Link(rollouts, "a0", dataclasses.replace(config.bus, keys=str(tmp_path / "keys"))) as thief:
        thief.send(ActorBye(reason="x"))
        told(rollouts, "key not allowed")

    context = zmq.Context()
    foreign = context.socket(zmq.DEALER)
    foreign.setsockopt(zmq.IDENTITY, b"a0.old")
    keys.identify(foreign, "a0.old", run.folder / "keys")
    foreign.connect(rollouts)
    foreign.send(b"\x01" + encode(ActorBye(reason="x"))[1:])
    told(rollouts, "no valid message")
    context.destroy(linger=0)

    with socket.create_connection(("127.0.0.1", port_of(weights))) as scanner:  # ten bytes as of ZeroMQ, then any
        scanner.sendall(b"\xff" + bytes(8) + b"\x7f" + random.Random(0).randbytes(500))
    told(weights, "handshake")
    with socket.create_connection(("127.0.0.1", port_of(weights))) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
    told(weights, "no greeting")

    books = all_is_trained(run, 40)
    assert books.ignored == {"not granted": 1}, "what was recorded counts once"
    refused = run.lines()[-1]["refused"]
    assert set(refused) >= {"no greeting of ZeroMQ", "key not allowed", "no valid message"}, refused


def test_a_clock_that_jumps_changes_nothing(make_run, tmp_path, monkeypatch):
    """Wall-clock time goes back and forth by a day in every process; no bound is measured with it."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import random, time\nreal = time.time\ntime.time = lambda: real() + random.choice((-86400.0, 0.0, 86400.0))\n"
    )
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    probe = [sys.executable, "-c", "import time; print(time.time.__name__)"]
    assert subprocess.run(probe, capture_output=True, text=True, check=True).stdout == "<lambda>\n"
    all_is_trained(make_run(SHORT, KEEP_OLD).start())


def test_a_killed_launcher_ends_its_run_which_can_be_resumed(make_run):
    run = make_run(SHORT, KEEP_OLD).start()
    run.until(lambda: run.steps() >= 3)
    everyone = run.process("launcher").children(recursive=True)
    assert run.kill("launcher")
    run.wait()
    _, left = psutil.wait_procs(everyone, timeout=60)
    assert left == []
    assert run.steps() < 14, "it did not go on to its end"
    all_is_trained(run.resume())
