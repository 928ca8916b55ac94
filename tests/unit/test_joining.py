"""Hosts that join a run by themselves: what is placed on them, how that ends, and which hosts are refused."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fake_generator import eventually
from joining_hosts import KEY, LIMIT_S, accepting, answer, composed, connected, free_ports, joined_run, placed

from inflight.bus import BusError, Link
from inflight.config import BusConfig, ConfigError, RunConfig
from inflight.exits import BAD_INPUT, STOPPED
from inflight.hosted import folder as folders
from inflight.hosted import join as joining
from inflight.hosted.output import KEPT_BYTES, KeptOutput
from inflight.hosted.running import Held
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.launcher.launch import launch
from inflight.launcher.restarts import Restarts
from inflight.messages import AnyMessage, Finish, Join, Placed, Refused, Status, Vacated
from inflight.processes import Ended
from inflight.starters.base import UNREACHABLE, Command
from inflight.starters.joining import VARIABLE, JoinStarter
from inflight.starters.parcel import Parcel, ParcelError, unpacked

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
    assert g0.address == "node3"
    assert (g0.poll(), g0.pid) == (None, None)
    second.send(Join(number=0, kind="generator", slot=0, host="node"))
    assert second.receive(0.3) is None, "nothing waits"
    g1 = starter.start(G1)
    assert placed(second).name == "g1"
    assert placed(first, slot=3) == parcel, "a placement that was lost with its connection is sent again"
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


def test_a_process_has_its_host_before_the_host_has_its_parcel(
    starter: JoinStarter, host: Callable[..., Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none once the host was lost meanwhile."""
    send, addresses = starter._listener.send, list[str]()

    def lost_at_first(peer: str, message: AnyMessage) -> None:
        addresses.append(g0.address)
        if len(addresses) == 1:
            raise BusError(f"{peer} is not connected")
        send(peer, message)

    monkeypatch.setattr(starter._listener, "send", lost_at_first)
    first, g0 = host("join.0"), starter.start(G0)
    first.send(Join(number=0, kind="generator", slot=0, host="gone"))
    until(lambda: addresses == ["gone"] and g0.address == "")
    assert placed(host("join.1")).name == "g0"
    assert addresses == ["gone", "node0"]
    assert g0.poll() is None


def test_a_host_that_offers_itself_anew_has_lost_what_it_ran(starter: JoinStarter, host: Callable[..., Link]) -> None:
    g0, link = starter.start(G0), host()
    placed(link)
    starter.start(G1)
    assert placed(link, number=1).name == "g1"
    assert g0.poll() == UNREACHABLE


def test_a_host_that_is_blamed_is_refused_and_others_are_not(starter: JoinStarter, host: Callable[..., Link]) -> None:
    bad, good, g0 = host("join.0"), host("join.1"), starter.start(G0)
    placed(bad)
    bad.send(Vacated(number=0, code=9))
    until(lambda: g0.poll() == 9)
    starter.refuse(["g0", "g7"])
    starter.start(G0)
    bad.send(Join(number=1, kind="generator", slot=0, host="node"))
    assert bad.receive(LIMIT_S) == Refused(reason="g0 has failed there again and again, and others work elsewhere")
    assert placed(good).name == "g0"


def test_an_actors_host_is_refused_where_no_actors_join(starter: JoinStarter, host: Callable[..., Link]) -> None:
    """It would wait for as long as the run lasts."""
    link = host()
    link.send(Join(number=0, kind="actor", slot=0, host="node"))
    reason = "no actors of this run are on hosts that join (hosts.actors_join=false)"
    assert link.receive(LIMIT_S) == Refused(reason=reason)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_a_host_and_leaves_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(folders, "IN_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)}
    for each in before:  # a shell starts what it leaves in the background with SIGINT ignored
        signal.signal(each, signal.SIG_DFL)

    def end() -> None:
        until(lambda: list((tmp_path / "shm").glob("*/join.key_secret")))
        os.kill(os.getpid(), number)

    try:
        threading.Thread(target=end, daemon=True).start()
        with pytest.raises(SystemExit) as caught:
            joining.main(["127.0.0.1:9", "--wait", "60"])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert caught.value.code == 128 + number
    assert not list((tmp_path / "shm").iterdir())


def test_an_error_in_the_thread_that_hears_hosts_ends_the_run_and_not_the_joining_alone(
    starter: JoinStarter, host: Callable[..., Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    starter.refuse([])
    monkeypatch.setattr(starter, "_hear", lambda *_: 1 / 0)
    host().send(Join(number=0, kind="generator", slot=0, host="node"))
    until(lambda: not starter._thread.is_alive())
    with pytest.raises(BusError, match="hosts can't join any more: ZeroDivisionError"):
        starter.refuse([])


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


class Host:
    """`inflight join` in a thread; what it runs lasts as long as its lease."""

    def __init__(self, run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.codes: list[int] = []
        monkeypatch.setattr(joining, "run", self._process)
        monkeypatch.setattr(joining.signal, "signal", lambda *_: None)  # of the main thread
        monkeypatch.setenv(VARIABLE, KEY)
        address = f"127.0.0.1:{run.bus.port + 5}"
        self._thread = threading.Thread(target=lambda: self.codes.append(joining.main([address])), daemon=True)
        self._thread.start()

    def _process(self, parcel: Parcel, lease_of: Callable[[float], Held]) -> int:
        self.ran.append(parcel.api_key)
        lease = lease_of(LIMIT_S)
        while lease.wait(0.05):
            pass
        return STOPPED

    def ended(self) -> int:
        self._thread.join(LIMIT_S)
        return self.codes[0]


def test_a_process_of_a_launcher_that_was_killed_does_not_outlive_the_resume_of_the_run(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launcher has the same address and join key, and all other keys are new: a host that did not notice
    would run a process that nobody hears, and offer itself to none."""
    before = JoinStarter(run, {VARIABLE: KEY})
    host = Host(run, monkeypatch)
    before.start(G0)
    until(lambda: host.ran)
    before._closing.set()
    before._thread.join()
    before._listener.close()  # without a word to the host
    run.api_key_file.write_text("B" * 43 + "\n")
    with accepting(run) as after:
        g0 = after.start(G0)
        until(lambda: len(host.ran) == 2)
        assert g0.poll() is None
        assert host.ran[1] == "B" * 43
        g0.stop()
        until(lambda: g0.poll() == STOPPED)
    assert host.ended() == 0


def test_a_host_that_can_not_run_a_process_says_why_and_ends_nothing(
    starter: JoinStarter, run: RunConfig, host: Callable[..., Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with another release does; no generator has worked before."""

    def refuse(_: bytes) -> Parcel:
        raise ParcelError("this host has inflight 0.0.1, the launcher's 0.1.0")

    monkeypatch.setattr(joining, "unpacked", refuse)
    log = run.path / "logs" / "g0.log"
    g0 = starter.start(replace(G0, log=log))
    assert Host(run, monkeypatch).ended() == 2
    until(lambda: g0.poll() == UNREACHABLE)
    assert "it can't run there: this host has inflight 0.0.1, the launcher's 0.1.0\n" in log.read_text()
    restarts = Restarts(replace(run, launch=replace(run.launch, restart_delay_s=0.001, restarts=0)))
    for _ in range(3):
        assert "the host of g0 is gone, another one gets it in" in str(restarts.failed(Ended(G0, UNREACHABLE)))
    due: list[Command] = []
    until(lambda: due.extend(restarts.due()) or due)
    again = starter.start(due[0])
    assert placed(host("join.7")).name == "g0"
    assert again.poll() is None


def test_a_host_that_fails_ends_the_run_only_where_no_other_generator_works(run: RunConfig) -> None:
    restarts = Restarts(replace(run, launch=replace(run.launch, restarts=1)))
    assert restarts.failed(Ended(G1, 1)) is None, "it would fail again anywhere"
    restarts.heard("a0", {"phase": "sampling"})
    assert restarts.failed(Ended(G1, 1)) is None, "an actor is no generator"
    restarts = Restarts(replace(run, launch=replace(run.launch, restarts=1)))
    restarts.heard("g0", {"running": 1})
    assert "(1 of 1)" in str(restarts.failed(Ended(G1, 2)))
    assert restarts.blamed() == []
    assert "on another host; its own is refused" in str(restarts.failed(Ended(G1, 1)))
    assert restarts.blamed() == ["g1"]
    assert restarts.blamed() == []
    restarts.ended("g0")
    assert restarts.failed(Ended(G1, 1)) is None, "none works any more"


def test_a_run_outlives_a_host_on_which_a_generator_never_works_and_not_the_last_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the launcher: the host is refused, and the generator works on the next one."""
    monkeypatch.setenv(VARIABLE, KEY)
    made = replace(composed("generator.count=2", "launch.restarts=1"), run_dir=str(tmp_path / "run"), chosen=None)
    run = replace(
        made,
        bus=replace(made.bus, port=free_ports(), heartbeat_s=0.1),
        launch=replace(made.launch, restart_delay_s=0.01, stop_grace_s=0.1),
    )
    answers: list[str] = []

    def place(link: Link, number: int) -> Parcel:
        parcel = unpacked(cast("Placed", answer(link, number)).parcel)
        answers.append(parcel.name)
        return parcel

    def hosts(good: Link, bad: Link, late: Link) -> None:
        with reporting(run, place(good, 0), tmp_path / "good"):
            for number in range(2):
                place(bad, number)
                bad.send(Vacated(number=number, code=2))
            with reporting(run, place(late, 0), tmp_path / "late"):
                answers.append(cast("Refused", answer(bad, 2)).reason)
                late.send(Vacated(number=0, code=9))
                answer(late, 1)  # refused as well: g1 has failed there, too
                good.send(Vacated(number=0, code=2))
                joining_is_over.wait(LIMIT_S)

    def run_hosts() -> None:
        with contextlib.ExitStack() as stack:
            hosts(*(stack.enter_context(connected(run, tmp_path, f"join.{each}")) for each in range(3)))

    joining_is_over = threading.Event()
    joining = threading.Thread(target=run_hosts, daemon=True)
    joining.start()
    lasts = [sys.executable, "-c", f"import time; time.sleep({4 * LIMIT_S})"]
    trainer = Command("trainer", "trainer", lasts, run.path / "logs" / "trainer.log")
    others = [replace(each, log=run.path / "logs" / f"{each.name}.log") for each in (G0, G1)]
    try:
        assert launch(run, [trainer, *others]) == BAD_INPUT
    finally:
        joining_is_over.set()
        joining.join(LIMIT_S)
    assert answers == ["g0", "g1", "g1", "g1", "g1 has failed there again and again, and others work elsewhere"]


@contextlib.contextmanager
def reporting(run: RunConfig, parcel: Parcel, keys: Path) -> Iterator[None]:
    """A process that works, and whose status the launcher has read."""
    keys.mkdir(mode=0o700)
    for name, content in parcel.keys.items():
        (keys / name).write_text(content)
        (keys / name).chmod(0o600)
    bus = BusConfig(heartbeat_s=0.1, keys=str(keys))
    with Link(run.endpoint("status"), parcel.name, bus, first_contact_s=LIMIT_S) as status:
        status.send(Status(source=parcel.name, values={"waiting": 4711}))
        until(lambda: run.snapshot_file.exists() and "4711" in run.snapshot_file.read_text())
        yield


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
        (["10.0.0.1", "--slot", "1025"], KEY, "--slot 1025 is not allowed: 0 to 1024"),
        (["10.0.0.1", "--slot", "-1"], KEY, "--slot -1 is not allowed: 0 to 1024"),
        (["127.0.0.1:9", "--wait", "0.1"], KEY, "127.0.0.1:9 for too long; no launcher is there, or"),
    ],
)
def test_what_keeps_a_host_from_joining_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], key: str, said: str
) -> None:
    monkeypatch.setenv(VARIABLE, key)
    assert joining.main(arguments) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("wait", ["nan", "inf", "-1", "1e9"])
def test_a_host_does_not_wait_without_a_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wait: str
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(joining, "Link", None)  # none is made
    assert joining.main(["127.0.0.1:9", "--wait", wait]) == BAD_INPUT
    said = f"inflight join: --wait {float(wait):g} is not allowed: 0 to 2592000 seconds\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("content", "said"), [(b"\xff" * 40, "is no join key: it is not UTF-8"), (b"k", "1 characters")]
)
def test_a_file_without_a_key_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    (tmp_path / "key").write_bytes(content)
    assert joining.main(["127.0.0.1:9", "--key-file", str(tmp_path / "key")]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_key_s_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\r\n", encoding="utf-8-sig")
    assert joining._key(tmp_path / "key", {}) == KEY


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
