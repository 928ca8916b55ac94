"""Which of the task's questions are settled, which is granted next, and which are re-queued.

A question is identified by its index in the task's stream, which depends on the seed alone; its group is named after
it. It is settled once it was trained on, dropped by the gate or failed permanently. Until then it is re-queued whenever
the attempt at it is lost, under the same name and so with the same sampling seeds: a slow answer is not replaced by
another sample.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping

from inflight.rollout.suspects import Suspects


class Indices:
    """A set of indices that contains nearly all of 0, 1, …: small in memory however large the indices are."""

    def __init__(self, below: int = 0, beyond: Iterable[int] = ()) -> None:
        """All indices below `below`, plus those in `beyond`."""
        self.below = below
        self._beyond = set(beyond)
        self._close_up()

    @property
    def beyond(self) -> list[int]:
        """Members above the first gap, ascending."""
        return sorted(self._beyond)

    def add(self, index: int) -> None:
        """Adds a member; no effect if it is one already."""
        if index >= self.below:
            self._beyond.add(index)
            self._close_up()

    def __contains__(self, index: int) -> bool:
        return index < self.below or index in self._beyond

    def _close_up(self) -> None:
        self._beyond = {index for index in self._beyond if index >= self.below}
        while self.below in self._beyond:
            self._beyond.remove(self.below)
            self.below += 1


class Questions:
    """Hands out indices, the lowest open one first; not thread-safe."""

    def __init__(self, settled: Indices, held: Iterable[int]) -> None:
        """`settled` are finished, `held` have a group that waits to be trained on; all others are open."""
        held = set(held)
        self.settled = settled
        self._suspects = Suspects()
        self.number: int | None = None
        """The task's number of questions; None while it is not known."""
        self._next = max([settled.below, *(index + 1 for index in settled.beyond), *(index + 1 for index in held)])
        self._open = [i for i in range(settled.below, self._next) if i not in settled and i not in held]
        """Heap of the indices below `_next` that no actor works on."""

    def end(self, questions: int) -> None:
        """The task has this many questions."""
        self.number = questions
        self._suspects.end(questions)
        self._open = [index for index in self._open if index < questions]
        heapq.heapify(self._open)

    @property
    def exhausted(self) -> bool:
        """Whether no question can be granted now."""
        return self._no_other and not self._suspects.waiting

    @property
    def _no_other(self) -> bool:
        return self.number is not None and not self._open and self._next >= self.number

    def take(self, actors: Mapping[str, Collection[int]], most: int, left: int) -> tuple[str, int] | None:
        """The next grant: (actor, question). `actors`: actor → its questions in flight, at most `most` each. `left`:
        how many more questions the run needs; none of these goes to a new question while suspects wait for it. None
        when no actor has a free slot or no question is left."""
        chosen = self._suspects.choose(actors, most)
        if chosen is None:
            return None
        name, suspect = chosen
        if suspect is not None:
            return name, suspect
        return None if self._no_other or left <= self._suspects.waiting else (name, self._other())

    def killed(self, index: int) -> bool:
        """An actor died with this question in flight. Returns whether the question is presumed to be the cause."""
        return self._suspects.died(index)

    def _other(self) -> int:
        if self._open:
            return heapq.heappop(self._open)
        self._next += 1
        return self._next - 1

    def give_back(self, index: int) -> None:
        """Re-queues a question whose attempt was lost."""
        if not self._suspects.give_back(index):
            heapq.heappush(self._open, index)

    def claim(self, index: int) -> bool:
        """Takes a re-queued question out of the queue; False when it is not in there."""
        if self._suspects.claim(index):
            return True
        if index not in self._open:
            return False
        self._open.remove(index)
        heapq.heapify(self._open)
        return True

    def settle(self, index: int) -> None:
        """Marks a question as settled."""
        self.settled.add(index)
        self._suspects.forget(index)
