"""Other hypotheses that could explain the record: each is a fault that the audit must be able to detect.

An alternative retags a rollout, or takes part of the weights from the version before, or both. Replaying it gives what
would have been recorded if it were true; evidence.py decides which hypothesis fits better.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from inflight.types import PrefillSpan, Rollout, VersionSpan, versions_of_tokens

Previous = Mapping[int, int]
"""Version → the one before it in this run; the first one is absent."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A hypothesis: `retag` returns the rollout as it would have been tagged (None: no different for this one)."""

    name: str
    says: str
    retag: Callable[[Rollout, Previous], Rollout | None]
    stale: re.Pattern[str] | None = None
    """Parameters that are taken from the version before."""


def previous_of(versions: Iterable[int]) -> dict[int, int]:
    """Each version's predecessor among those given."""
    ordered = sorted(set(versions))
    return dict(zip(ordered[1:], ordered, strict=False))


def swapped_late(rollout: Rollout, previous: Previous) -> Rollout | None:
    """Each swap in the middle of the sequence took effect one token later than tagged."""
    return _shifted(rollout, -1)


def swapped_early(rollout: Rollout, previous: Previous) -> Rollout | None:
    """One token earlier."""
    return _shifted(rollout, +1)


def one_version_old(rollout: Rollout, previous: Previous) -> Rollout | None:
    """The engine stamped each version but still ran the one before."""
    turn = rollout.turn
    spans = [VersionSpan(span.start, previous.get(span.version, span.version)) for span in turn.token_versions]
    prefills = [
        PrefillSpan(e.output_index, e.position, previous.get(e.version, e.version)) for e in turn.prefill_versions
    ]
    return _retagged(rollout, spans, prefills)


def old_prefix(rollout: Rollout, previous: Previous) -> Rollout | None:
    """The prompt's KV, but for its last position, came from a prefix cache that the version before had filled."""
    last = len(rollout.prompt_ids) - 1
    first = [event for event in rollout.turn.prefill_versions if event.output_index == 0]
    rest = [event for event in rollout.turn.prefill_versions if event.output_index != 0]
    if not first or last < 1 or first[0].version not in previous:
        return None
    prefix = [PrefillSpan(0, 0, previous[first[0].version]), PrefillSpan(0, last, first[-1].version)]
    return _retagged(rollout, rollout.turn.token_versions, prefix + rest)


def as_tagged(rollout: Rollout, previous: Previous) -> Rollout | None:
    """For hypotheses about weights alone; the first version has no predecessor."""
    mentioned = {span.version for span in rollout.turn.token_versions}
    return rollout if mentioned & previous.keys() else None


LATE = Alternative("late", "swaps took effect one token later than tagged", swapped_late)
EARLY = Alternative("early", "swaps took effect one token earlier than tagged", swapped_early)
OLD = Alternative("old", "the version before ran under each tag", one_version_old)
PREFIX = Alternative("prefix", "prompts reused KV of the version before", old_prefix)
HEAD = Alternative("head", "the output layer was left at the version before", as_tagged, re.compile(r"^lm_head\."))
STANDARD = (LATE, EARLY, OLD, PREFIX, HEAD)


def by_name(name: str, layers: int) -> Alternative:
    """A standard one, or `layer.K`: layer K of `layers` was left at the version before.

    Raises ValueError for another name.
    """
    for each in STANDARD:
        if each.name == name:
            return each
    found = re.fullmatch(r"layer\.(\d{1,6})", name)
    if found is None or int(found[1]) >= layers:
        known = ", ".join(each.name for each in STANDARD)
        raise ValueError(f"{name!r} is none of {known}, layer.0 to layer.{layers - 1}")
    layer = int(found[1])
    says = f"layer {layer} was left at the version before"
    return Alternative(f"layer.{layer}", says, as_tagged, re.compile(rf"\.layers\.{layer}\."))


def _shifted(rollout: Rollout, by: int) -> Rollout | None:
    """Tags moved along the tokens; a token that a prefill sampled keeps its tag, which is the prefill's."""
    turn = rollout.turn
    tags = versions_of_tokens(turn.token_versions, len(turn.token_ids))
    fixed = {event.output_index for event in turn.prefill_versions}
    moved = [
        tag if index in fixed or not 0 <= index + by < len(tags) else tags[index + by] for index, tag in enumerate(tags)
    ]
    starts = [index for index in range(len(moved)) if index == 0 or moved[index] != moved[index - 1]]
    return _retagged(rollout, [VersionSpan(index, moved[index]) for index in starts], turn.prefill_versions)


def _retagged(rollout: Rollout, spans: list[VersionSpan], prefills: list[PrefillSpan]) -> Rollout | None:
    turn = rollout.turn
    if spans == turn.token_versions and prefills == turn.prefill_versions:
        return None
    return msgspec.structs.replace(
        rollout, turn=msgspec.structs.replace(turn, token_versions=spans, prefill_versions=prefills)
    )
