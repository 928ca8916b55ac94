"""Questions that were in flight when an actor died: one may be the cause, and the others must not suffer for it.

deaths   how it is asked
0        as any other
1        beside questions without a death, one such question at an actor at a time
2        alone: its actor works on nothing else
3        not any more: the last one was its own doing
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Collection, Mapping

MAX_DEATHS = 3
"""Deaths of an actor while it worked on a question, the last of them alone, after which the question is given up."""
_ALONE = MAX_DEATHS - 1


class Suspects:
    """Those that wait to be asked, and the deaths of all that are not settled; not thread-safe."""

    def __init__(self) -> None:
        self._deaths: collections.Counter[int] = collections.Counter()
        self._open: list[int] = []
        """Ascending."""

    def died(self, index: int) -> bool:
        """An actor died with this question in flight; whether it is to be given up."""
        self._deaths[index] += 1
        return self._deaths[index] >= MAX_DEATHS

    def give_back(self, index: int) -> bool:
        """It is to be asked again; False when it is no suspect."""
        if index not in self._deaths:
            return False
        bisect.insort(self._open, index)
        return True

    def claim(self, index: int) -> bool:
        """Takes one that waits; False when it does not."""
        if index not in self._open:
            return False
        self._open.remove(index)
        return True

    def end(self, questions: int) -> None:
        """Those from this index on do not exist."""
        self._open = [index for index in self._open if index < questions]

    @property
    def waiting(self) -> int:
        """How many are to be asked."""
        return len(self._open)

    def forget(self, index: int) -> None:
        """It is done with for good."""
        del self._deaths[index]

    def choose(self, actors: Mapping[str, Collection[int]], most: int) -> tuple[str, int | None] | None:
        """Who is asked next, of actors with what each has in flight, `most` at once: the name, and the suspect, taken,
        or None for any other question. None when nobody may be asked now."""
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
            del free[fewest]  # it works off what it has, and then this one
        elif self._open:
            unwatched = [name for name in free if not any(index in self._deaths for index in free[name])]
            if unwatched:
                return self._taken(min(unwatched, key=lambda name: (len(free[name]), name)), self._open[0])
        return (min(free, key=lambda name: (len(free[name]), name)), None) if free else None

    def _taken(self, actor: str, index: int) -> tuple[str, int]:
        self._open.remove(index)
        return actor, index
