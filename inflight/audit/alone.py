"""Sequences that were alone in some of their steps: when, is found out from what the engine recorded.

A lone row takes another kernel, which rounds another way, and nothing in a rollout says when its sequence had no other
beside it. So each time is tried: a trial has the steps between which a sequence was alone, and ends at the first token
that does not come out as recorded, bit for bit. The trial that comes furthest is the one that is tried on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.audit.replay import Job, Sequenced

TURNS = 6
"""Times that a sequence was left alone, or joined by others, at the most."""
BACK = 64
"""Tokens by which being alone may show late: of lone rows one in eleven differs, so nearly all show within these."""


@dataclass(slots=True)
class Trial(Job):
    """A sequence with the tokens from which on it was alone, then in company, then alone, …"""

    turns: Sequence[int] = ()
    recorded: Sequence[float] = field(default_factory=list)
    reached: int = 0
    """Tokens that came out as recorded."""

    @property
    def alone(self) -> bool:
        """In the step that samples the next token."""
        return sum(turn <= len(self.logprobs) for turn in self.turns) % 2 == 1

    def judge(self) -> None:
        """After a pass: no pass is left to run when the last token is not as recorded."""
        if self.reached == len(self.logprobs):
            return
        if self.logprobs[self.reached] == self.recorded[self.reached]:
            self.reached += 1
        else:
            self.todo.clear()


@dataclass(slots=True)
class _Search:
    """What is known of one sequence."""

    sequence: Sequenced
    recorded: Sequence[float]
    turns: list[int] = field(default_factory=list)
    reached: int = -1
    """Tokens that the turns explain; -1 before the first trial."""
    logprobs: list[float] | None = None
    """Once all are."""
    given_up: bool = False

    @property
    def next_turns(self) -> list[list[int]]:
        """To be tried; the last one may have come at any token since the one before it."""
        if self.reached < 0:
            return [[]]
        first = self.turns[-1] + 1 if self.turns else 0
        last = self.reached
        return [[*self.turns, at] for at in range(max(first, last - BACK), last + 1)]

    def take(self, trials: Sequence[Trial]) -> None:
        """The trial that came furthest."""
        best = max(trials, key=lambda trial: trial.reached, default=None)
        if best is None or best.reached <= self.reached:
            self.given_up = True
            return
        self.turns, self.reached = list(best.turns), best.reached
        if best.reached == len(self.recorded):
            self.logprobs = best.logprobs


def explain(
    sequences: Sequence[Sequenced],
    recorded: Sequence[Sequence[float]],
    run: Callable[[list[Trial]], None],
    trial: Callable[[Sequenced, Sequence[float], list[int]], Trial],
) -> list[list[float] | None]:
    """For each sequence the log-probabilities under the turns that explain it, None where none do.

    `trial` makes one, `run` runs some, however many.
    """
    searches = [_Search(*each) for each in zip(sequences, recorded, strict=True)]
    for _ in range(TURNS + 1):
        going = [search for search in searches if search.logprobs is None and not search.given_up]
        tried = [[trial(search.sequence, search.recorded, turns) for turns in search.next_turns] for search in going]
        run([each for trials in tried for each in trials])
        for search, trials in zip(going, tried, strict=True):
            search.take(trials)
    return [search.logprobs for search in searches]
