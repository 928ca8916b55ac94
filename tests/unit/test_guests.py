"""Generators and actors that nobody has configured: who is admitted, under which name and key, and what it means when
they leave."""

from __future__ import annotations

import asyncio
import functools
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fake_generator import eventually
from fleet import Fleet
from joining_hosts import KEY, LIMIT_S, accepting, answer, composed, connected, free_ports, joined_run, placed

from inflight.actor import pool as pool_module
from inflight.actor.pool import Pool
from inflight.bus import Link, Listener, Lost, Received, add_key, make_keys, remove_key
from inflight.config import BusConfig, ConfigError, RunConfig
from inflight.config.effect import require_effect
from inflight.exits import DONE, STOPPED
from inflight.generator.engine_args import _engine_seed
from inflight.launcher.compose import compose
from inflight.launcher.exported import LauncherMetrics
from inflight.launcher.guests import Guests
from inflight.launcher.launch import launch
from inflight.messages import Commit, Join, Placed, Refused, Vacated
from inflight.processes import Ended
from inflight.starters.base import UNREACHABLE, Command
from inflight.starters.joining import VARIABLE, JoinStarter
from inflight.starters.parcel import unpacked
from inflight.view.progress import Progress
from inflight.weights.publish.events import Failure
from inflight.weights.publish.routes import routes

JOINING = ("network.bind=127.0.0.1", "hosts.starter=join", "hosts.actors_join=true")
LIMITED = ("hosts.actors_join=true", "hosts.most_generators=3", "hosts.most_actors=2", "launch.restarts=1")
until = functools.partial(eventually, timeout_s=LIMIT_S)
BEATS = BusConfig(heartbeat_s=0.05, dead_after_s=20.0)


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return joined_run(tmp_path / "run", *LIMITED)


@pytest.fixture
def starter(run: RunConfig) -> Iterator[JoinStarter]:
    with accepting(run) as made:
        yield made


@pytest.fixture
def hosts(run: RunConfig, tmp_path: Path) -> Iterator[list[Link]]:
    links = [connected(run, tmp_path, f"join.{number}") for number in range(4)]
    yield links
    for link in links:
        link.close()


def offer(starter: JoinStarter, link: Link, kind: str = "generator", number: int = 0) -> None:
    before = starter.unserved(kind)
    link.send(Join(number=number, kind=kind, slot=0, host="node"))
    until(lambda: starter.unserved(kind) == before + 1)


def test_hosts_beyond_the_configured_count_get_names_and_keys_of_their_own(
    starter: JoinStarter, hosts: list[Link], run: RunConfig
) -> None:
    guests = Guests(run, starter)
    own = starter.start(Command("g0", "generator", ["true"], None, host="a host that joins"))
    assert placed(hosts[0]).name == "g0"
    assert guests.due() == []
    for link in hosts[1:]:
        offer(starter, link)
    admitted = guests.due()
    assert [each.name for each in admitted] == ["g1", "g2"], "three at once, and one of them is configured"
    handles = [starter.start(each) for each in admitted]
    assert guests.due() == [], "for these offers processes wait"
    for link, name in zip(hosts[1:], ("g1", "g2"), strict=False):
        parcel = placed(link)
        assert (parcel.name, set(parcel.keys)) == (name, {"listener.key", f"{name}.key_secret"})
        assert (Path(run.bus.keys) / "allowed" / f"{name}.key").exists()
    assert guests.of(["generator"]) == ["g1", "g2"]
    hosts[1].send(Vacated(number=0, code=1))
    until(lambda: handles[0].poll() == 1)
    said = guests.left(Ended(admitted[0], 1))
    assert said == f"g1 has left the run, with code 1; its log: {run.path / 'logs' / 'g1.log'}"
    assert not list(Path(run.bus.keys).glob("**/g1.*"))
    (further,) = guests.due()
    assert further.name == "g3", "the fourth host, under a name that no process had"
    starter.start(further)
    assert placed(hosts[3]).name == "g3"
    assert guests.left(Ended(replace(further, name="g0"), 1)) is None, "a configured one that fails is restarted"
    assert own.poll() is None


def test_an_actor_is_admitted_like_a_generator(starter: JoinStarter, hosts: list[Link], run: RunConfig) -> None:
    guests = Guests(run, starter)
    for link in hosts[:2]:
        offer(starter, link, "actor")
    (command,) = guests.due()
    assert (command.name, command.kind, command.configured) == ("a1", "actor", False)
    starter.start(command)
    assert placed(hosts[0], kind="actor").name == "a1"


def test_a_host_on_which_they_fail_again_and_again_is_refused(
    starter: JoinStarter, hosts: list[Link], run: RunConfig
) -> None:
    guests, host = Guests(run, starter), hosts[0]
    for number in range(2):  # launch.restarts=1
        offer(starter, host, number=number)
        (command,) = guests.due()
        handle = starter.start(command)
        placed(host, number)
        host.send(Vacated(number=number, code=9))
        until(lambda handle=handle: handle.poll() == 9)
        guests.left(Ended(command, 9))
    host.send(Join(number=2, kind="generator", slot=0, host="node"))
    reason = "2 processes have failed there, one after the other (launch.restarts)"
    assert host.receive(LIMIT_S) == Refused(reason=reason)
    assert guests.due() == []


def test_a_host_that_is_asked_to_end_its_process_has_not_failed(
    starter: JoinStarter, hosts: list[Link], run: RunConfig
) -> None:
    guests, host = Guests(run, starter), hosts[0]
    offer(starter, host)
    for number in range(3):
        (command,) = guests.due()
        starter.start(command)
        placed(host, number)
        host.send(Vacated(number=number, code=STOPPED))
        offer(starter, host, number=number + 1)
        guests.left(Ended(command, STOPPED))
    (command,) = guests.due()
    assert "with its host" in str(guests.left(Ended(command, UNREACHABLE)))
    (command,) = guests.due()
    guests.left(Ended(command, DONE))
    assert guests.due() == [], "a process that exits with code 0 was sent Finish: the run is over"


def test_without_a_limit_nobody_is_admitted(starter: JoinStarter, hosts: list[Link], run: RunConfig) -> None:
    as_before = replace(run, hosts=replace(run.hosts, most_generators=0, most_actors=0))
    offer(starter, hosts[0])
    assert Guests(as_before, starter).due() == []
    assert Guests(run, None).due() == []


def test_a_guest_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through the launcher: its host offers itself again, and gets the next name."""
    monkeypatch.setenv(VARIABLE, KEY)
    made = replace(composed(*LIMITED), run_dir=str(tmp_path / "run"), chosen=None)
    run = replace(made, bus=replace(made.bus, port=free_ports(), heartbeat_s=0.1))
    over = tmp_path / "over"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(over)!r}).exists(): time.sleep(0.05)"
    trainer = Command("trainer", "trainer", [sys.executable, "-c", code], run.path / "logs" / "trainer.log")
    names: list[str] = []

    link = connected(run, tmp_path, "join.0")

    def host() -> None:
        try:
            with link:
                for number in range(2):
                    names.append(unpacked(cast("Placed", answer(link, number)).parcel).name)
                    link.send(Vacated(number=number, code=1, output="no room"))
                until(lambda: guests_of(run) == ["g1", "g2"] and not (run.path / "keys" / "g2.key_secret").exists())
        finally:
            over.touch()

    joining = threading.Thread(target=host, daemon=True)
    joining.start()
    try:
        assert launch(run, [trainer]) == 0
    finally:
        over.touch()
    joining.join(LIMIT_S)
    assert names == ["g1", "g2"]
    said = capfd.readouterr().err
    assert "g1 has left the run, with code 1" in said
    assert "no room" in (run.path / "logs" / "g1.log").read_text()


def guests_of(run: RunConfig) -> list[str]:
    """Generators whose logs or keys are there."""
    keys = {path.stem for path in (run.path / "keys").glob("g*.key_secret")}
    logs = {path.stem for path in (run.path / "logs").glob("g*.log")}
    return sorted((keys | logs) - {"g0"})


def test_a_key_is_accepted_from_when_it_is_made_until_it_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, ["g0"])
    bus = replace(BEATS, keys=str(folder))
    with Listener("tcp://127.0.0.1:*", bus) as listener:
        add_key(folder, "g1")
        with Link(listener.endpoint, "g1.r0", bus) as link:
            link.send(Commit(version=1))
            assert listener.receive(LIMIT_S) == Received("g1.r0", Commit(version=1))
        assert listener.receive(LIMIT_S) == Lost("g1.r0")
        theirs = tmp_path / "theirs"
        shutil.copytree(folder, theirs)
        remove_key(folder, "g1")
        with Link(listener.endpoint, "g1.r0", replace(bus, keys=str(theirs))) as late:
            late.send(Commit(version=2))
            until(lambda: listener.refusals.counts["key not allowed"])
        assert listener.receive(0) is None


def test_the_publisher_sends_to_guests_and_forgets_them_when_they_leave() -> None:
    fleet = Fleet(1, elastic=True, guest_ranks=1)
    fleet.come("g0")
    fleet.come("g4711")
    fleet.settle()
    fleet.publish()
    fleet.settle()
    assert fleet.books() == {"g0": 1, "g4711": 1}
    assert set(routes(1, fleet.protocol.replicas, 2).generators) == {"g0", "g4711"}
    fleet.publish()
    fleet.attempts.pop().announce()
    fleet.attempts.pop().announce()  # version 2 is under way to both
    fleet.go("g4711")
    fleet.protocol.expire()
    fleet.settle()
    assert "g4711" not in {each.generator for each in fleet.protocol.replicas}
    assert fleet.books() == {"g0": 2}
    failed = [event for event in fleet.session.events.since(0) if isinstance(event, Failure)]
    assert failed == []
    fleet.go("g0")
    fleet.protocol.expire()
    assert "g0" in {each.generator for each in fleet.protocol.replicas}, "a configured one is waited for"


def test_a_publisher_without_guests_refuses_unknown_names() -> None:
    fleet = Fleet(1, elastic=True)
    fleet.come("g4711")
    refused = [(peer, message.reason) for peer, message in fleet.queued if isinstance(message, Refused)]
    assert Counter(refused) == Counter(
        (f"g4711.{member}", "no generator of this run is named g4711") for member in ("r0", "engine")
    )


def test_an_actor_uses_generators_for_as_long_as_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.02)

    async def healthy(session: object, url: str, timeout_s: float) -> bool:
        return True

    monkeypatch.setattr(pool_module, "healthy", healthy)

    async def main() -> None:
        urls: dict[str, str] = {}

        def url_of(name: str) -> str:
            if name not in urls:
                raise FileNotFoundError(name)
            return urls[name]

        async def becomes(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(LIMIT_S):
                while not condition():  # noqa: ASYNC110 - the pool has no event for it
                    await asyncio.sleep(0.01)

        async def shows(*names: str) -> None:
            await becomes(lambda: {name for name, each in pool.generators.items() if each.up} == set(names))

        async with Pool(None, ["g0"], url_of, listed=urls.keys) as pool:  # type: ignore[arg-type]
            urls |= {"g0": "there", "g7": "there"}
            await shows("g0", "g7")
            async with pool.lease(["g0"], LIMIT_S) as leased:
                assert leased.name == "g7"
                urls.clear()
                await shows()
                await asyncio.sleep(0.1)
                assert "g7" in pool.generators, "its request is not over"
            await becomes(lambda: "g7" not in pool.generators)
            assert set(pool.generators) == {"g0"}

    asyncio.run(main())


def test_names_of_guests_are_numbered_on() -> None:
    run = composed(*LIMITED)
    before = replace(run, hosts=replace(run.hosts, most_generators=0))
    assert [run.is_generator(name) for name in ("g0", "g7", "g07", "a1", "g", "g1234567")] == [True, True, *[False] * 4]
    assert [before.is_generator(name) for name in ("g0", "g1")] == [True, False]
    assert len({_engine_seed(run, name) for name in ("g0", "g1", "g7")}) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["hosts.most_generators=1", "generator.count=2"],
            "hosts.most_generators=1 is not allowed: 0, or at least the",
        ),
        (["hosts.most_generators=2000"], "hosts.most_generators=2000 is not allowed: at most 1024"),
        (["hosts.most_actors=2", "hosts.actors_join=false"], "hosts.most_actors is set and has no effect"),
    ],
)
def test_a_limit_that_can_not_be_kept_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        require_effect(compose("tiny", [f"run_dir={tmp_path}", *JOINING, *options]))


def test_a_limit_needs_hosts_that_join(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"hosts\.most_generators is set and has no effect: hosts\.starter is not join"
    ):
        require_effect(compose("tiny", [f"run_dir={tmp_path}", "hosts.most_generators=4"]))


def test_the_view_and_the_metrics_know_them_while_they_are_there() -> None:
    progress = Progress(composed(*LIMITED))
    progress.update("g12", {"version": 3})
    progress.update("g7", {"version": 3})
    progress.update("a1", {"in_flight": 1})
    assert progress.generators() == ["g0", "g7", "g12"]
    assert "g12 version 3" in progress.line()
    progress.forget("g12")
    assert progress.generators() == ["g0", "g7"]
    metrics = LauncherMetrics(["trainer", "g0"])

    def shown() -> dict[str, float]:
        (family,) = (each for each in metrics.registry.collect() if each.name == "inflight_launcher_process_running")
        return {sample.labels["name"]: sample.value for sample in family.samples}

    metrics.running = ["trainer", "g7"]
    assert shown() == {"trainer": 1, "g0": 0, "g7": 1}
    metrics.running = ["trainer"]
    assert shown() == {"trainer": 1, "g0": 0}
