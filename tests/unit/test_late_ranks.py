"""Generators whose engine and ranks connect one after the other, long after the publisher was made."""

from __future__ import annotations

from fleet import CONFIG, Fleet

from inflight.messages import EngineHello, RankHello, Refused

WAIT_S = CONFIG.transfer_timeout_s
START = {"generator": "g0", "world_size": 1, "incarnation": "f" * 16}


def refusals(fleet: Fleet) -> list[object]:
    return [message for _, message in fleet.queued if isinstance(message, Refused)]


def wait(fleet: Fleet, seconds: float) -> None:
    for _ in range(int(2 * seconds)):
        fleet.now += 0.5
        fleet.protocol.expire()


def engine_comes(fleet: Fleet) -> None:
    fleet.connected.add("g0.engine")
    fleet.protocol.hear("g0.engine", EngineHello(url="http://127.0.0.1:1", **START))


def rank_comes(fleet: Fleet) -> None:
    fleet.connected.add("g0.r0")
    fleet.protocol.hear("g0.r0", RankHello(rank=0, **START))


def test_a_rank_that_connects_shortly_after_its_engine_joins_however_old_the_publisher_is():
    fleet = Fleet(1, elastic=False)
    wait(fleet, 3 * WAIT_S)
    engine_comes(fleet)
    wait(fleet, WAIT_S / 2)
    assert not refusals(fleet), "the engine has just come"
    rank_comes(fleet)
    fleet.settle()
    assert fleet.books() == {"g0": 0}


def test_an_engine_without_its_rank_is_refused_after_the_time_of_a_transfer_each_time_anew():
    fleet = Fleet(1, elastic=False)
    engine_comes(fleet)
    wait(fleet, WAIT_S / 2)
    rank_comes(fleet)
    fleet.settle()
    wait(fleet, 3 * WAIT_S)
    fleet.connected.discard("g0.r0")
    fleet.protocol.lost("g0.r0")
    wait(fleet, WAIT_S / 2)
    assert not refusals(fleet), "the half time of before does not count"
    wait(fleet, WAIT_S)
    assert "g0.r0 is not there since" in refusals(fleet)[0].reason
