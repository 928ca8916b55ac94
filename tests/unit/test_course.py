"""Where a task ends, and its next epoch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from inflight.tasks.addition import Addition
from inflight.tasks.base import Item
from inflight.tasks.course import Course, NoMoreQuestions

LENGTH = 12


class Listed:
    """Ends as a sequence does."""

    def __init__(self):
        self.asked = []

    def item(self, index):
        self.asked.append(index)
        return [Item(f"k{number}", "p", "a") for number in range(LENGTH)][index]


class Long(Listed):
    """Says how long it is; what lies beyond would not be noticed."""

    def __len__(self):
        return LENGTH

    def item(self, index):
        self.asked.append(index)
        return Item(f"k{index}", "p", "a")


class Iterated:
    """Can't go back."""

    def __init__(self):
        self.left = iter(range(LENGTH))

    def item(self, index):
        return Item(f"k{next(self.left)}", "p", "a")


def keys(course, indices):
    return [course.item(index).key for index in indices]


@pytest.mark.parametrize("kind", [Listed, Long, Iterated])
def test_a_task_ends_once(kind):
    course = Course(kind())
    assert keys(course, range(LENGTH)) == [f"k{index}" for index in range(LENGTH)]
    for index in (LENGTH, LENGTH + 1, 1000):
        with pytest.raises(NoMoreQuestions) as end:
            course.item(index)
        assert end.value.questions == LENGTH


@pytest.mark.parametrize("kind", [Listed, Long])
def test_epochs_begin_again(kind):
    course = Course(kind(), epochs=2)
    assert keys(course, range(2 * LENGTH)) == [f"k{index}" for index in range(LENGTH)] * 2
    with pytest.raises(NoMoreQuestions) as end:
        course.item(2 * LENGTH)
    assert end.value.questions == 2 * LENGTH


@pytest.mark.parametrize("index", [LENGTH, LENGTH + 1, 1000])
def test_the_end_is_found_from_beyond_it(index):
    """By a resumed run, or a restarted process."""
    task = Listed()
    with pytest.raises(NoMoreQuestions) as end:
        Course(task).item(index)
    assert end.value.questions == LENGTH
    assert len(task.asked) < 15
    assert Course(Listed(), epochs=1000).item(index).key == f"k{index % LENGTH}"


def test_an_error_between_questions_is_no_end():
    class Broken(Listed):
        def item(self, index):
            return ["a short list"][1] if index == 5 else super().item(index)

    course = Course(Broken())
    with pytest.raises(IndexError):
        course.item(5)
    assert keys(course, [4, 6]) == ["k4", "k6"]

    class Odd(Long):
        def item(self, index):
            raise StopIteration

    with pytest.raises(StopIteration):
        Course(Odd()).item(3)


def test_other_errors_and_endless_tasks():
    class Failing:
        def item(self, index):
            raise KeyError(index)

    with pytest.raises(KeyError):
        Course(Failing()).item(0)
    assert keys(Course(Addition(seed=0)), [3, 10_000]) == [Addition(seed=0).item(index).key for index in (3, 10_000)]


def test_how_many_there_are_is_known_beforehand_only_of_a_task_that_says_it():
    assert Course(Long(), epochs=2).questions == 2 * LENGTH
    assert Course(Long(), epochs=10**20).questions == sys.maxsize, "which a message holds"
    assert Course(Addition(seed=0)).questions is None
    course = Course(Listed(), epochs=2)
    assert course.questions is None
    with pytest.raises(NoMoreQuestions):
        course.item(1000)
    assert course.questions == 2 * LENGTH


def test_an_empty_task():
    @dataclass
    class Empty:
        def __len__(self):
            return 0

    with pytest.raises(NoMoreQuestions) as end:
        Course(Empty(), epochs=3).item(0)
    assert end.value.questions == 0
