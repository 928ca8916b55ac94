"""A reader of a send buffer learns what is packed only when it is. (Real streams: tests/gpu/test_faults_gpu.py.)"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from inflight.weights.publish.progress import PackingProgress


class Event:
    """Stands for a CUDA event: done from the start, or once somebody has waited for it."""

    made: ClassVar[list[Event]] = []

    def __init__(self, blocking):
        assert blocking
        self.done, self.waits = False, 0
        self.made.append(self)

    def record(self, stream):
        assert stream == "stream"

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True
        self.waits += 1


@pytest.fixture
def progress(monkeypatch):
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    progress = PackingProgress()
    for end in (10, 20, 30, 40):
        progress.mark(end, "stream")
    return progress


def test_each_part_is_waited_for_before_it_is_told(progress):
    told = [(end, [event.waits for event in Event.made]) for end in progress]
    assert told == [(10, [1, 0, 0, 0]), (20, [1, 1, 0, 0]), (30, [1, 1, 1, 0]), (40, [1, 1, 1, 1])]


def test_parts_that_are_done_are_told_as_one(progress):
    Event.made[0].done = Event.made[1].done = True
    assert list(progress) == [20, 30, 40]
    assert [event.waits for event in Event.made] == [0, 1, 1, 1]
    assert list(progress) == [40], "a second reader: another generator"


def test_without_cuda_a_mark_is_done():
    progress = PackingProgress()
    for end in (10, 20):
        progress.mark(end, None)
    assert list(progress) == [20]
