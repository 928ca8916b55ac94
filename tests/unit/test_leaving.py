"""A version that is out when its generator is asked to end is not a failed one, in the events and in a summary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_generator import BUS, FakeGenerator, eventually

from inflight.bus import Listener
from inflight.config import PublishConfig
from inflight.metrics import SWAPS_FILE, JsonLines
from inflight.report.summary import summarize
from inflight.trainer.lines import swap_line
from inflight.weights.publish.events import Event, Failure, Left, Swap
from inflight.weights.publish.publisher import Publisher
from inflight.weights.publish.states import ReplicaState
from inflight.weights.source import WeightSource

CONFIG = PublishConfig(bucket_bytes=4096, join_timeout_s=20, retry_after_s=60)


class Pair:
    """A publisher and a generator that holds each version but the first before it builds it."""

    def __init__(self, endpoint: str) -> None:
        self.listener = Listener(endpoint, BUS)
        source = WeightSource(torch.nn.Linear(8, 8), "float32")
        self.publisher = Publisher(source, self.listener, CONFIG, version=0, ranks={"g0": 1})
        self.generator = FakeGenerator(endpoint)
        self.generator.start()
        self.publisher.wait_joined(20)
        self.let_go = threading.Event()
        self.generator.shadows[0].hold["build"] = self.let_go

    def publish(self, version: int) -> None:
        self.publisher.publish(version)

    def events(self) -> list[Event]:
        """The outcomes of the versions after the first."""
        return [event for event in self.publisher.events if event.version > 0]

    def leave(self, *, asked: bool) -> None:
        """The engine's process says goodbye, as it does before its ranks end."""
        self.generator._closing.set()
        self.generator._thread.join(5)
        self.generator.engine.close(asked=asked)
        eventually(lambda: self.publisher.states["g0"][0] is ReplicaState.ABSENT, "its leaving")

    def close(self) -> None:
        self.let_go.set()
        self.generator.close()
        self.publisher.close()
        self.listener.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(f"ipc://{tmp_path}/w")
    yield pair
    pair.close()


def test_what_a_generator_that_is_asked_to_end_does_not_get_has_not_failed(pair: Pair) -> None:
    pair.publish(1)
    pair.leave(asked=True)
    pair.publish(2)
    reason = "g0.engine was asked to end"
    assert pair.events() == [Left("g0", 1, reason), Left("g0", 2, f"ABSENT, {reason}")]
    assert pair.publisher.stats()["failures"] == 0


def test_one_that_ends_by_itself_has_failed(pair: Pair) -> None:
    """It says goodbye as well: its engine died, say."""
    pair.publish(1)
    pair.leave(asked=False)
    (failure,) = pair.events()
    assert isinstance(failure, Failure)
    assert (failure.version, failure.phase, failure.reason) == (1, "receive", "g0.engine was lost")


def test_what_fails_after_its_return_has_failed(pair: Pair, tmp_path: Path) -> None:
    pair.publish(1)
    pair.leave(asked=True)
    again = FakeGenerator(f"ipc://{tmp_path}/w").start()
    try:
        eventually(lambda: pair.publisher.committed == {"g0": 1}, "its return")
        again.shadows[0].fail["build"] = RuntimeError("no memory")
        pair.publish(2)
        pair.publisher.flush(20)
    finally:
        again.close()
    assert [type(event) for event in pair.events()] == [Left, Swap, Failure]


def test_a_summary_counts_it_as_no_failed_swap(tmp_path: Path) -> None:
    with JsonLines(tmp_path / SWAPS_FILE) as swaps:
        swaps.write(swap_line(Left("g0", 1, "g0.engine was asked to end")))
        swaps.write(swap_line(Failure("g0", 1, "receive", "g0.engine was lost")))
    assert summarize(tmp_path).swaps_failed == 1
