"""A recorded group as a person asks about it: each token with its text, its version and its lag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.groups import index_of
from inflight.types import Rollout, RolloutGroup, versions_of_tokens

Texts = Callable[[Sequence[int]], list[str]]
"""[T] token ids → [T] their texts."""
NOT_YET = "not trained on: in the trainer's buffer, or in a step that was not finished"


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """One rollout."""

    rollout: Rollout
    texts: list[str] | None
    """[T] what each token adds to the text; None without a tokenizer."""
    versions: list[int] | None
    """[T] the version that sampled each token; None where the recorded spans do not fit the tokens."""
    trained_at: int | None
    """The trainer's version when the group was trained on; None when it was not."""
    left_out: bool
    """Whether the gate left this rollout out of a group that was trained on."""

    @property
    def lags(self) -> list[int] | None:
        """[T] lag of each token when it was trained on."""
        if self.versions is None or self.trained_at is None:
            return None
        return [self.trained_at - version for version in self.versions]


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """One group: a prompt and its answers."""

    group: RolloutGroup
    prompt: str | None
    """None without a tokenizer."""
    answers: list[ShownRollout]
    trained_at: int | None
    fate: str
    """Its outcome, as far as the run has recorded that: trained on, dropped for a reason, or neither."""


class Training:
    """When each question was trained on and which groups the gate dropped, from the lines of metrics.jsonl."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._at = {int(index): int(line["version"]) - 1 for line in lines for index in line.get("questions", ())}
        self.left_out = {name for line in lines for name in line.get("left_out", ())}
        """Rollouts that the gate left out of groups that were trained on."""
        self._dropped: dict[str, str] = {}
        for line in lines:
            self._dropped.update(line.get("dropped") or {})

    def trained_at(self, group_id: str) -> int | None:
        """The trainer's version when this group was trained on."""
        index = index_of(group_id)
        return None if index is None or group_id in self._dropped else self._at.get(index)

    def fate(self, group_id: str) -> str:
        """The outcome of the group, as text."""
        reason = self._dropped.get(group_id)
        if reason is not None:
            return f"dropped by the gate: {reason}"
        at = self.trained_at(group_id)
        return NOT_YET if at is None else f"trained on in step {at + 1}, at version {at}"


def asked(group: RolloutGroup, training: Training, texts: Texts | None) -> ShownGroup:
    """The group with all that is known about it."""
    at = training.trained_at(group.group_id)
    answers = [_answer(rollout, training, at, texts) for rollout in group.rollouts]
    prompt = "".join(texts(group.rollouts[0].prompt_ids)) if texts is not None else None
    return ShownGroup(group, prompt, answers, at, training.fate(group.group_id))


def _answer(rollout: Rollout, training: Training, trained_at: int | None, texts: Texts | None) -> ShownRollout:
    turn = rollout.turn
    try:
        versions = versions_of_tokens(turn.token_versions, len(turn.token_ids))
    except ValueError:
        versions = None
    text = texts(turn.token_ids) if texts is not None else None
    return ShownRollout(rollout, text, versions, trained_at, rollout.rollout_id in training.left_out)
