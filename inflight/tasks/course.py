"""A task's questions, numbered consecutively over its epochs, and where they end.

A task ends where its `__len__` says. Without one, or while that raises TypeError (a stream does not know yet), it ends
where `item` raises IndexError or StopIteration, like a sequence or an iterator. Such an error between existing
questions is an error of that question alone.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from inflight.tasks.base import Item, Reordered, Task

ENDS = (IndexError, StopIteration)


class NoMoreQuestions(Exception):
    """There is no such question: the task has `questions` of them, over all epochs."""

    def __init__(self, questions: int) -> None:
        super().__init__(f"the task has {questions} questions")
        self.questions = questions


class Course:
    """The questions of `epochs` passes over a task; an endless task never leaves the first."""

    def __init__(self, task: Task, epochs: int = 1) -> None:
        """Raises what the task's `__len__` raises."""
        self._task = task
        self._epochs = epochs
        self._length = self._said()
        self._told = -1
        """The highest index that the task has returned an item for."""

    @property
    def questions(self) -> int | None:
        """How many there are over all epochs; None while that is not known, and for an endless task."""
        return None if self._length is None else min(self._length * self._epochs, sys.maxsize)

    def item(self, index: int) -> Item:
        """The task's item; `index` continues over epochs. Raises NoMoreQuestions, or what the task raises."""
        if self._length is None:
            try:
                item = self._task.item(index)
            except ENDS:
                self._length = self._said()
                if self._length is None:
                    if self._is_there(index + 1):
                        raise
                    self._length = self._first_missing(index)
            else:
                self._told = max(self._told, index)
                return item
        if index >= self._length * self._epochs:
            raise NoMoreQuestions(self._length * self._epochs)
        epoch, index = divmod(index, self._length)
        if isinstance(self._task, Reordered):
            return self._task.item_of_epoch(epoch, index)
        return self._task.item(index)

    def _said(self) -> int | None:
        """The length that the task says it has; None where it says none."""
        if not hasattr(self._task, "__len__"):
            return None
        try:
            return len(cast(Any, self._task))
        except TypeError:
            return None

    def _is_there(self, index: int) -> bool:
        try:
            self._task.item(index)
        except ENDS:
            return False
        return True

    def _first_missing(self, missing: int) -> int:
        """Binary search. Indices up to the highest returned one exist, even if the task can't go back to them."""
        there = self._told
        while missing - there > 1:
            middle = (there + missing) // 2
            if self._is_there(middle):
                there = middle
            else:
                missing = middle
        return missing
