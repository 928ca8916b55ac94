"""Hosts that join a run by themselves: what is placed on them, how that ends, and which hosts are refused."""

from __future__ import annotations

import functools
import os
import random
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_generator import eventually
from joining_hosts import KEY, LIMIT_S, accepting, connected, joined_run, placed

from inflight.bus import Link
from inflight.config import ConfigError, RunConfig
from inflight.exits import STOPPED
from inflight.hosted import join as joining
from inflight.hosted.output import KEPT_BYTES, KeptOutput
from inflight.hosted.running import Held
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.messages import Finish, Join, Vacated
from inflight.starters.base import UNREACHABLE, Command
from inflight.starters.joining import VARIABLE, JoinStarter
from inflight.starters.parcel import Parcel

until = functools.partial(eventually, timeout_s=LIMIT_S)
G0, G1 = (Command(name, "generator", ["true"], None, host="a host that joins") for name in ("g0", "g1"))


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return joined_run(tmp_path / "run", "generator.count=2")


@pytest.fixture
def starter(run: RunConfig) -> Iterator[JoinStarter]:
    with accepting(run) as made:
        yield made


@pytest.fixture
def host(run: RunConfig, tmp_path: Path) -> Iterator[Callable[..., Link]]:
    """Makes connections of hosts, which have the key."""
    links: list[Link] = []

    def connect(name: str = "join.0", key: str = KEY) -> Link:
        links.append(connected(run, tmp_path / str(len(links)), name, key))
        return links[-1]

    yield connect
    for link in links:
        link.close()


def test_a_host_runs_what_waits_and_again_what_has_ended(
    starter: JoinStarter, host: Callable[..., Link], run: RunConfig
) -> None:
    log = run.path / "logs" / "g0.log"
    logged = replace(G0, log=log)
    first, second, g0 = host("join.0"), host("join.1"), starter.start(logged)
    parcel = placed(first, slot=3)
    assert (parcel.name, parcel.slot, parcel.trainer) == ("g0", 3, "127.0.0.1")
    assert (g0.poll(), g0.address, g0.pid) == (None, "node3", None)
    second.send(Join(number=0, kind="actor", slot=0, host="node"))
    second.send(Join(number=0, kind="generator", slot=0, host="node"))
    assert second.receive(0.3) is None, "nothing waits"
    g1 = starter.start(G1)
    assert placed(second).name == "g1"
    first.send(Join(number=0, kind="generator", slot=3, host="node3"))  # a repeat that was under way
    first.send(Vacated(number=7, code=1))  # of another offer
    first.send(Vacated(number=0, code=1, output="no room\nfor the model\n"))
    until(lambda: g0.poll() is not None)
    assert (g0.poll(), g1.poll()) == (1, None)
    assert log.read_text() == "(the end of its output on node3, code 1)\nno room\nfor the model\n"
    again = starter.start(logged)
    assert placed(first, number=1).name == "g0"
    first.close()
    until(lambda: again.poll() is not None)
    assert again.poll() == UNREACHABLE
    assert log.read_text().endswith("for the model\n(node0 is gone; its output has stayed there)\n")
    third = starter.start(G0)
    g1.stop()
    assert second.receive(LIMIT_S) == Finish(reason="the process is to end")
    second.send(Vacated(number=0, code=STOPPED))
    until(lambda: g1.poll() == STOPPED)
    third.stop()
    assert third.poll() == STOPPED, "it had no host yet"


def test_a_host_that_offers_itself_anew_has_lost_what_it_ran(starter: JoinStarter, host: Callable[..., Link]) -> None:
    g0, link = starter.start(G0), host()
    placed(link)
    starter.start(G1)
    assert placed(link, number=1).name == "g1"
    assert g0.poll() == UNREACHABLE


def test_the_end_of_the_run_dismisses_hosts(run: RunConfig, host: Callable[..., Link]) -> None:
    starter, link = JoinStarter(run, {VARIABLE: KEY}), host()
    link.send(Join(number=0, kind="generator", slot=0, host="node"))
    until(lambda: starter._listener.peers())
    starter.close()
    assert link.receive(LIMIT_S) == Finish(reason="the run is over")


def test_without_the_key_nothing_is_placed(starter: JoinStarter, host: Callable[..., Link], run: RunConfig) -> None:
    g0 = starter.start(G0)
    host("join.2", "x" * 43).send(Join(number=0, kind="generator", slot=0, host="node"))
    with socket.create_connection(("127.0.0.1", run.bus.port + 5)) as scanner:
        scanner.sendall(random.Random(0).randbytes(500))
        counts = starter._listener.refusals.counts
        until(lambda: counts["handshake of another protocol"] and counts["no greeting of ZeroMQ"])
    assert g0.poll() is None
    assert placed(host("join.3")).name == "g0"


def test_the_key_comes_from_the_environment_or_lies_in_the_run_folder(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    JoinStarter(run, {}).close()
    file = run.path / "join.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text().strip()) >= 32
    said = capsys.readouterr().out
    assert said == f"hosts join this run: inflight join 127.0.0.1:{run.bus.port + 5} (the key: {file})\n"
    assert file.read_text().strip() not in said
    with pytest.raises(ConfigError, match="INFLIGHT_JOIN_KEY has 5 characters, a join key has 32 to 256") as caught:
        JoinStarter(run, {VARIABLE: "short"})
    assert "short" not in str(caught.value)


# --- inflight join ---


def test_a_host_offers_itself_runs_and_leaves_with_the_run(
    starter: JoinStarter, run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int]] = []

    def process(parcel: Parcel, lease_of: Callable[[float], Held]) -> int:
        """The first one fails, the second one lasts as long as its lease."""
        ran.append((parcel.name, parcel.slot))
        os.write(1, f"output {len(ran)} of {parcel.name}\n".encode())  # as a child does
        lease = lease_of(LIMIT_S)
        while len(ran) > 1 and lease.wait(0.05):
            pass
        return 9 if len(ran) == 1 else STOPPED

    monkeypatch.setattr(joining, "run", process)
    monkeypatch.setattr(joining.signal, "signal", lambda *_: None)  # of the main thread
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    log = run.path / "logs" / "g0.log"
    g0 = starter.start(replace(G0, log=log))
    codes: list[int] = []
    address = f"127.0.0.1:{run.bus.port + 5}"
    command = threading.Thread(target=lambda: codes.append(joining.main([address, "--wait", str(LIMIT_S)])))
    command.start()
    until(lambda: g0.poll() == 9)
    assert "output 1 of g0\n" in log.read_text()
    log.unlink()
    again = starter.start(replace(G0, log=log))
    until(lambda: len(ran) == 2)
    again.stop()
    until(lambda: again.poll() == STOPPED)
    starter.close()
    command.join(LIMIT_S)
    assert (ran, codes) == ([("g0", 2), ("g0", 2)], [0])
    assert "output 2 of g0\n" in log.read_text()
    assert "output 1" not in log.read_text()
    assert "the run is over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "slot"),
    [({}, 0), ({"SLURM_LOCALID": "3", "LOCAL_RANK": "1"}, 3), ({"LOCAL_RANK": "1"}, 1), ({"LOCAL_RANK": "x"}, 0)],
)
def test_the_slot_is_the_tasks_number_on_its_host(environment: dict[str, str], slot: int) -> None:
    assert joining.slot_of(environment) == slot


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["host.example"], KEY, "'host.example' is not allowed: an IP address, or ADDRESS:PORT"),
        (["10.0.0.1"], "", "INFLIGHT_JOIN_KEY has 0 characters"),
        (["127.0.0.1:9", "--wait", "0.1"], KEY, "nothing heard from tcp://127.0.0.1:9"),
    ],
)
def test_what_keeps_a_host_from_joining_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], key: str, said: str
) -> None:
    monkeypatch.setenv(VARIABLE, key)
    assert joining.main(arguments) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_default_port_is_that_of_the_launcher(tmp_path: Path) -> None:
    config = compose("tiny", [f"run_dir={tmp_path}", "network.bind=fd00::1"])
    assert joining.endpoint_of("fd00::1") == config.endpoint("join")


def test_generators_wait_for_hosts_and_the_rest_stays(tmp_path: Path) -> None:
    options = ["network.bind=127.0.0.1", "hosts.starter=join", "generator.count=2"]
    found = {each.name: bool(each.host) for each in usual_commands(compose("tiny", [f"run_dir={tmp_path}", *options]))}
    assert found == {"trainer": False, "g0": True, "g1": True, "a0": False}
    config = compose("tiny", [f"run_dir={tmp_path}", *options, "hosts.actors_join=true"])
    assert {each.name for each in usual_commands(config) if each.host} == {"g0", "g1", "a0"}


def test_output_is_shown_as_before_and_its_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with KeptOutput() as output:
        os.write(1, b"before\n")
        output.forget()
        os.write(1, b"x" * (3 * KEPT_BYTES))  # more than a pipe holds
        os.write(2, b"\xff the end\n")
        assert output.last() == "x" * (KEPT_BYTES - 10) + "\ufffd the end\n"
    os.write(1, b"after\n")
    shown = capfd.readouterr()
    assert shown.out == "before\n" + "x" * (3 * KEPT_BYTES) + "after\n"
    assert shown.err.endswith(" the end\n")
