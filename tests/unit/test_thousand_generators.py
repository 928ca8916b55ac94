"""The publisher's state of a thousand generators that join, leave, fail and rejoin; no threads, no bytes."""

from __future__ import annotations

from collections import Counter

import pytest
from fleet import CONFIG, Fleet

from inflight.weights.publish.events import Failure, Swap
from inflight.weights.publish.routes import routes

COUNT = 1000


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(COUNT, elastic=True)


def test_a_thousand_come_and_the_books_are_theirs(fleet: Fleet) -> None:
    for number in range(COUNT):
        if number % 250 == 0:  # versions are published while they join
            fleet.settle()
            fleet.publish()
        fleet.come(f"g{number}")
    fleet.settle()
    assert fleet.books() == fleet.holds == dict.fromkeys((f"g{number}" for number in range(COUNT)), 4)
    listed = routes(fleet.protocol.version, fleet.protocol.replicas, CONFIG.max_behind)
    assert len(listed.generators) == COUNT
    assert {route.version for route in listed.generators.values()} == {4}


def test_who_goes_fails_or_never_came_is_told_apart(fleet: Fleet) -> None:
    present = [f"g{number}" for number in range(0, COUNT, 2)]
    for name in present:
        fleet.come(name)
    fleet.settle()
    gone, fleet.failing = set(present[:100]), set(present[100:150])
    for name in gone:
        fleet.go(name)
    fleet.publish()
    fleet.settle()
    assert fleet.books() == {name: 0 if name in fleet.failing else 1 for name in present if name not in gone}
    assert {name: fleet.holds[name] for name in fleet.books()} == fleet.books()
    events = fleet.session.events.since(0)
    failed = Counter((event.generator, event.phase) for event in events if isinstance(event, Failure))
    assert failed == Counter([(name, "absent") for name in gone] + [(name, "build") for name in fleet.failing])
    swaps = Counter(event.generator for event in events if isinstance(event, Swap) and event.version == 1)
    assert swaps == Counter(set(present) - gone - fleet.failing), "and nothing is said of the 500 that never came"
    fleet.failing.clear()
    fleet.now += 5.0
    fleet.protocol.expire()
    for name in [*gone, "g1", "g3"]:
        fleet.come(name)
    fleet.settle()
    assert fleet.books() == fleet.holds == dict.fromkeys([*present, "g1", "g3"], 1)


def test_where_all_are_expected_what_one_misses_is_recorded_from_the_start() -> None:
    fleet = Fleet(COUNT, elastic=False)
    fleet.come("g0")
    fleet.settle()
    fleet.publish()
    fleet.settle()
    missed = [event for event in fleet.session.events.since(0) if isinstance(event, Failure)]
    assert len(missed) == COUNT - 1
