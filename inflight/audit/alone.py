"""Finds the steps in which a sequence was alone in the engine, from the recorded log-probabilities.

A single row uses another kernel, which rounds differently, and a rollout does not record when its sequence had no other
beside it. So possibilities are tried: a trial assumes steps between which a sequence was alone, and ends at the first
token that does not come out as recorded, bit for bit. The trial that gets furthest is extended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.audit.replay import Job, Sequenced

TURNS = 6
"""Most times that a sequence became alone, or was joined by others."""
BACK = 64
"""Tokens within which being alone shows: one in eleven tokens of single rows differs, so nearly all show within
these."""


@dataclass(slots=True)
class Trial(Job):
    """A sequence with the tokens at which it became alone, then had company, then was alone, …"""

    turns: Sequence[int] = ()
    recorded: Sequence[float] = field(default_factory=list)
    reached: int = 0
    """Number of tokens that came out as recorded."""

    @property
    def alone(self) -> bool:
        """Whether it is alone in the step that samples the next token."""
        return sum(turn <= len(self.logprobs) for turn in self.turns) % 2 == 1

    def judge(self) -> None:
        """Called after a pass: removes all further passes when the last token is not as recorded."""
        if self.reached == len(self.logprobs):
            return
        if self.logprobs[self.reached] == self.recorded[self.reached]:
            self.reached += 1
        else:
            self.todo.clear()


@dataclass(slots=True)
class _Search:
    """The state of the search for one sequence."""

    sequence: Sequenced
    recorded: Sequence[float]
    turns: list[int] = field(default_factory=list)
    reached: int = -1
    """Number of tokens that the turns explain; -1 before the first trial."""
    logprobs: list[float] | None = None
    """The log-probabilities, once all tokens are explained."""
    given_up: bool = False

    @property
    def next_turns(self) -> list[list[int]]:
        """The next possibilities: the last turn may have been at any token since the one before it."""
        if self.reached < 0:
            return [[]]
        first = self.turns[-1] + 1 if self.turns else 0
        last = self.reached
        return [[*self.turns, at] for at in range(max(first, last - BACK), last + 1)]

    def take(self, trials: Sequence[Trial]) -> None:
        """Keeps the trial that got furthest."""
        best = max(trials, key=lambda trial: trial.reached, default=None)
        if best is None or best.reached <= self.reached:
            self.given_up = True
            return
        self.turns = list(best.turns)
        self.reached = best.reached
        if best.reached == len(self.recorded):
            self.logprobs = best.logprobs


def explain(
    sequences: Sequence[Sequenced],
    recorded: Sequence[Sequence[float]],
    run: Callable[[list[Trial]], None],
    trial: Callable[[Sequenced, Sequence[float], list[int]], Trial],
) -> list[list[float] | None]:
    """For each sequence the log-probabilities under the turns that explain it, None if none do.

    `trial` makes one trial, `run` runs any number of them.
    """
    searches = [_Search(*each) for each in zip(sequences, recorded, strict=True)]
    for _ in range(TURNS + 1):
        going = [search for search in searches if search.logprobs is None and not search.given_up]
        tried = [[trial(search.sequence, search.recorded, turns) for turns in search.next_turns] for search in going]
        run([each for trials in tried for each in trials])
        for search, trials in zip(going, tried, strict=True):
            search.take(trials)
    return [search.logprobs for search in searches]
