"""Derives from a rollout's tags the forward passes that they claim.

A sequence is prompt and completion in one row of positions. Output token j is sampled from the logits at the position
before it. The step that samples it also writes the KV of that position, so the KV of a generated token is written under
the *next* token's version. Prefill events tell where KV was written otherwise: the prompt at the start, chunk by chunk,
and everything again after a preemption.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.types import PrefillSpan, Rollout, versions_of_tokens

UNKNOWN = -1
"""A prefill event's version when the engine does not know it: KV from another version's prefix cache or an external
cache."""


class TagError(ValueError):
    """Tags that contradict themselves, whatever the weights were."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A forward pass over positions [start, end) under one version, reading the KV of all positions before `start`.

    KV that was written at `start` or beyond is replaced. Positions from `scored` on are those that sampled the token
    after them in this very pass; `scored == end` means none.
    """

    start: int
    end: int
    version: int
    scored: int

    def one_by_one(self) -> list[Segment]:
        """The same passes as an engine runs them: positions that sample nothing at once, then one pass per token."""
        if self.scored == self.end:
            return [self]
        first = Segment(self.start, self.scored + 1, self.version, self.scored)
        return [first, *(Segment(at, at + 1, self.version, at) for at in range(self.scored + 1, self.end))]


def segments(rollout: Rollout) -> list[Segment]:
    """The passes in the order in which they ran; consecutive ones of one version are joined.

    Example: a prompt of 3 tokens and 4 sampled ones with spans [(0, 5), (2, 6)] give
    `[Segment(0, 4, 5, scored=2), Segment(4, 6, 6, scored=4)]`.

    Raises TagError when the first token was not preceded by a prefill from position 0, when a prefill leaves a gap, or
    when a token's version is not that of the pass that sampled it.
    """
    turn = rollout.turn
    prompt = len(rollout.prompt_ids)
    try:
        versions = versions_of_tokens(turn.token_versions, len(turn.token_ids))
    except ValueError as error:
        raise TagError(str(error)) from None
    events: defaultdict[int, list[PrefillSpan]] = defaultdict(list)
    for event in turn.prefill_versions:
        events[event.output_index].append(event)
    if versions and not events[0]:
        raise TagError("no prefill event for the first token")
    passes: list[Segment] = []
    for index, version in enumerate(versions):
        last = prompt + index - 1
        if not events[index]:
            _append(passes, Segment(last, last + 1, version, last))
            continue
        chunks = _chunks(events[index], known=0 if index == 0 else last, end=last + 1)
        if chunks[-1][2] != version:
            raise TagError(f"token {index} is tagged {version}, the prefill that sampled it {chunks[-1][2]}")
        for start, end, prefill in chunks:
            _append(passes, Segment(start, end, prefill, last if end == last + 1 else end))
    return passes


def _chunks(events: Sequence[PrefillSpan], known: int, end: int) -> list[tuple[int, int, int]]:
    """(start, end, version) up to `end`, ascending; a later event replaces earlier ones beyond its position.

    `known` is the first position without KV.
    """
    starts: list[tuple[int, int]] = []
    for event in events:
        while starts and starts[-1][0] >= event.position:
            starts.pop()
        starts.append((event.position, event.version))
    if starts[0][0] > known or starts[-1][0] >= end:
        raise TagError(f"prefill from position {starts[0][0]} to {starts[-1][0]}, but KV is known to {known} of {end}")
    ends = [start for start, _ in starts[1:]] + [end]
    return [(start, upto, version) for (start, version), upto in zip(starts, ends, strict=True)]


def _append(passes: list[Segment], new: Segment) -> None:
    """Adds a pass; joins it to the one before if that is the same computation."""
    last = passes[-1] if passes else None
    if last is None or last.version != new.version or last.end != new.start:
        passes.append(new)
    elif last.scored == last.end:
        passes[-1] = Segment(last.start, new.end, new.version, new.scored)
    elif new.scored == new.start:
        passes[-1] = Segment(last.start, new.end, new.version, last.scored)
    else:
        passes.append(new)
