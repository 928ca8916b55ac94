"""Faults that are planted in a record, on copies of what a sound engine recorded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from inflight.audit.replay import Sequenced
from inflight.audit.segments import segments
from inflight.types import PrefillSpan, Rollout, Turn, VersionSpan

Groups = list[list[Rollout]]
Replay = Callable[[Sequence[Sequenced]], list[list[float]]]
"""Log-probabilities of sequences, as a replayer gives them."""
OFFSET = 0.05
ONE_VALUE = 0.01
"""Nats."""


def tag_off_by_one(groups: Groups) -> Groups:
    """In one rollout a swap is tagged a token late."""

    def change(turn: Turn) -> dict[str, object]:
        first, second, *rest = turn.token_versions
        return {"token_versions": [first, VersionSpan(second.start + 1, second.version), *rest]}

    return _one(groups, _has_swap, change)


def version_before(groups: Groups) -> Groups:
    """One rollout is tagged with the version before throughout."""

    def change(turn: Turn) -> dict[str, object]:
        return {
            "token_versions": [VersionSpan(span.start, span.version - 1) for span in turn.token_versions],
            "prefill_versions": [
                PrefillSpan(each.output_index, each.position, each.version - 1) for each in turn.prefill_versions
            ],
        }

    return _one(groups, lambda rollout: min(e.version for e in rollout.turn.prefill_versions) > 0, change)


def spans_merged(groups: Groups) -> Groups:
    """One rollout's tokens all bear the version of the first one."""
    return _one(groups, _has_swap, lambda turn: {"token_versions": turn.token_versions[:1]})


def constant(groups: Groups) -> Groups:
    """All log-probabilities are -1."""
    return _all(groups, lambda turn: [-1.0] * len(turn.logprobs))


def random_numbers(groups: Groups) -> Groups:
    """All log-probabilities are drawn from [-8, 0]."""
    source = random.Random(0)
    return _all(groups, lambda turn: [-8 * source.random() for _ in turn.logprobs])


def shifted(groups: Groups) -> Groups:
    """Each log-probability is that of the token before."""
    return _all(groups, lambda turn: [turn.logprobs[-1], *turn.logprobs[:-1]])


def offset(groups: Groups) -> Groups:
    """All log-probabilities are OFFSET too large."""
    return _all(groups, lambda turn: [value + OFFSET for value in turn.logprobs])


def one_value(groups: Groups) -> Groups:
    """One log-probability of one rollout is ONE_VALUE too large."""

    def change(turn: Turn) -> dict[str, object]:
        middle = len(turn.logprobs) // 2
        return {"logprobs": [value + ONE_VALUE * (at == middle) for at, value in enumerate(turn.logprobs)]}

    return _one(groups, lambda rollout: True, change)


def exchanged(groups: Groups) -> Groups:
    """Two rollouts of different prompts have each other's log-probabilities."""
    chosen = groups[0][0]
    length = len(chosen.turn.logprobs)
    other = next(each for members in groups[1:] for each in members if len(each.turn.logprobs) == length)
    values = {chosen.rollout_id: other.turn.logprobs, other.rollout_id: chosen.turn.logprobs}
    return _each(groups, lambda r: _with(r, logprobs=values[r.rollout_id]) if r.rollout_id in values else r)


def unprocessed(groups: Groups, sampled: Replay, plain: Replay) -> Groups:
    """Log-probabilities at temperature 1 where another one ran, rounded as the recorded ones are.

    `sampled` and `plain` are replays at the two temperatures.
    """
    rollouts = [rollout for members in groups for rollout in members]
    claims: list[Sequenced] = [
        ([*rollout.prompt_ids, *rollout.turn.token_ids], segments(rollout), ()) for rollout in rollouts
    ]
    changed = {
        rollout.rollout_id: [x - s + p for x, s, p in zip(rollout.turn.logprobs, at_own, at_one, strict=True)]
        for rollout, at_own, at_one in zip(rollouts, sampled(claims), plain(claims), strict=True)
    }
    return _each(groups, lambda rollout: _with(rollout, logprobs=changed[rollout.rollout_id]))


RECORDED: dict[str, Callable[[Groups], Groups]] = {
    "tag off by one token, one rollout": tag_off_by_one,
    "version - 1, one rollout": version_before,
    "spans merged, one rollout": spans_merged,
    "log-probabilities constant": constant,
    "log-probabilities random": random_numbers,
    "log-probabilities shifted by a token": shifted,
    f"log-probabilities {OFFSET} too large": offset,
    f"one value {ONE_VALUE} too large": one_value,
    "log-probabilities of two rollouts exchanged": exchanged,
    "a group dropped": lambda groups: [groups[0], *groups[2:]],
    "a group doubled": lambda groups: [*groups, groups[1]],
}
"""What is planted → how; that another temperature was recorded needs replays, see `unprocessed`."""


def _has_swap(rollout: Rollout) -> bool:
    spans = rollout.turn.token_versions
    starts = [span.start for span in spans] + [len(rollout.turn.token_ids)]
    prefilled = {event.output_index for event in rollout.turn.prefill_versions}
    return len(spans) > 1 and starts[1] + 1 < starts[2] and starts[1] not in prefilled


def _one(groups: Groups, fits: Callable[[Rollout], bool], change: Callable[[Turn], dict[str, object]]) -> Groups:
    """The first rollout that fits is changed."""
    chosen = next(rollout for members in groups for rollout in members if fits(rollout))
    return _each(groups, lambda rollout: _with(rollout, **change(rollout.turn)) if rollout is chosen else rollout)


def _all(groups: Groups, logprobs: Callable[[Turn], list[float]]) -> Groups:
    return _each(groups, lambda rollout: _with(rollout, logprobs=logprobs(rollout.turn)))


def _each(groups: Groups, change: Callable[[Rollout], Rollout]) -> Groups:
    return [[change(rollout) for rollout in members] for members in groups]


def _with(rollout: Rollout, **fields: object) -> Rollout:
    return msgspec.structs.replace(rollout, turn=msgspec.structs.replace(rollout.turn, **fields))
