"""The soak's check of version tags: right ones pass, and each kind of wrong one is reported."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu_soak import Tags, memory


def output(*spans: tuple[int, int], tokens: int = 1, prefills: tuple[tuple[int, int, int], ...] = ()) -> Any:
    made = SimpleNamespace(token_ids=[7] * tokens, token_versions=list(spans), prefill_versions=list(prefills))
    return SimpleNamespace(request_id="r", outputs=[made])


@pytest.fixture
def tags() -> Tags:
    """Version 5 is live, 6 was ordered and answered, and four steps of it were seen."""
    tags = Tags(5)
    tags.told(6)
    tags.step([output((3, 5)), output((0, 5))])  # dispatched before
    tags.answered(6)
    for index in range(4):
        tags.step([output((4 + index, 6)), output((1 + index, 6))])
    return tags


def test_right_tags_pass(tags: Tags) -> None:
    tags.step([output((9, 6), prefills=((0, 0, 5), (4, 0, 6)))])
    assert tags.summary() == {"steps": 6, "tokens": 11, "changes_in_sequences": 2, "preemptions": 1, "faults": []}


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([output((9, 6)), output((9, 5))], r"one step has tokens of versions \[5, 6\]"),
        ([output((9, 7))], "version 7 before the engine had the order, its newest was 6"),
        ([output((9, 5))], "version 5 after 6 was seen"),
        ([output((9, 6), prefills=((4, 0, 6), (0, 0, 6)))], "prefills"),
        ([output((9, 6), prefills=((0, 0, 7),))], "prefills"),
    ],
)
def test_wrong_tags_are_reported(tags: Tags, outputs: list[Any], says: str) -> None:
    tags.step(outputs)
    (fault,) = tags.faults
    assert re.search(says, fault)


def test_an_old_version_that_keeps_running_is_reported() -> None:
    tags = Tags(0)
    tags.told(1)
    tags.answered(1)
    for index in range(5):  # the first three may have been dispatched before
        tags.step([output((index, 0))])
    assert len(tags.faults) == 2
    assert "1 was answered" in tags.faults[0]


def test_memory_counts_this_process() -> None:
    seen = memory(100)
    assert seen["update"] == 100
    assert seen["rss_mib"][0] > 10
