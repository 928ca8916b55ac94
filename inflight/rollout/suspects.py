"""Questions that were in flight when an actor died: one may be the cause, and the others must not suffer for it.

deaths   how the question is granted
0        as any other
1        beside questions without a death, at most one such question per actor at a time
2        alone: its actor works on nothing else
3        no more: the last death was caused by it
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Collection, Mapping

MAX_DEATHS = 3
"""Deaths of an actor while it worked on a question, the last one on it alone, after which the question is given up."""
_ALONE = MAX_DEATHS - 1


class Suspects:
    """The suspects that wait for a grant, and the number of deaths of all unsettled questions; not thread-safe."""

    def __init__(self) -> None:
        self._deaths: collections.Counter[int] = collections.Counter()
        self._open: list[int] = []
        """Ascending."""

    def died(self, index: int) -> bool:
        """An actor died with this question in flight. Returns whether the question is to be given up."""
        self._deaths[index] += 1
        return self._deaths[index] >= MAX_DEATHS

    def give_back(self, index: int) -> bool:
        """Re-queues a suspect; False when it is none."""
        if index not in self._deaths:
            return False
        bisect.insort(self._open, index)
        return True

    def claim(self, index: int) -> bool:
        """Takes a waiting suspect out of the queue; False when it is not in there."""
        if index not in self._open:
            return False
        self._open.remove(index)
        return True

    def end(self, questions: int) -> None:
        """The task has this many questions: later ones are removed."""
        self._open = [index for index in self._open if index < questions]

    @property
    def waiting(self) -> int:
        """How many wait for a grant."""
        return len(self._open)

    def forget(self, index: int) -> None:
        """Removes a settled question."""
        del self._deaths[index]

    def choose(self, actors: Mapping[str, Collection[int]], most: int) -> tuple[str, int | None] | None:
        """The next grant, given actor → its questions in flight, at most `most` each: (actor, suspect), with the
        suspect taken out of the queue, or (actor, None) for any other question. None when nothing may be granted
        now."""
        free = {
            name: held
            for name, held in actors.items()
            if len(held) < most and not any(self._deaths[index] >= _ALONE for index in held)
        }
        if not free:
            return None
        fewest = min(free, key=lambda name: (len(free[name]), name))
        alone = next((index for index in self._open if self._deaths[index] >= _ALONE), None)
        if alone is not None:
            if not free[fewest]:
                return self._taken(fewest, alone)
            del free[fewest]  # this actor finishes its work first and is granted the suspect then
        elif self._open:
            unwatched = [name for name in free if not any(index in self._deaths for index in free[name])]
            if unwatched:
                return self._taken(min(unwatched, key=lambda name: (len(free[name]), name)), self._open[0])
        return (min(free, key=lambda name: (len(free[name]), name)), None) if free else None

    def _taken(self, actor: str, index: int) -> tuple[str, int]:
        self._open.remove(index)
        return actor, index
