"""The data that is compared: rollouts with the passes that their tags claim, and all their tokens in a row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from inflight.audit.evidence import Misses
from inflight.audit.replay import KeptVersions, Sequenced
from inflight.audit.segments import UNKNOWN, Segment, TagError, segments
from inflight.groups import MAX_VOCABULARY
from inflight.types import Rollout, versions_of_tokens


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout and the passes that its tags claim."""

    rollout: Rollout
    passes: list[Segment]

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.rollout.prompt_ids, *self.rollout.turn.token_ids]

    @property
    def versions(self) -> list[int]:
        """[T] the version of each sampled token."""
        return versions_of_tokens(self.rollout.turn.token_versions, len(self.rollout.turn.token_ids))

    @property
    def sequence(self) -> Sequenced:
        """In the format of a replayer."""
        return self.tokens, self.passes, self.rollout.turn.kept or ()

    @property
    def swaps(self) -> int:
        """Number of changes of version between its tokens."""
        return sum(left != right for left, right in itertools.pairwise(self.versions))

    @property
    def mixed(self) -> int:
        """Number of tokens that were sampled on some KV of another version than theirs."""
        kv: list[int] = []
        count = 0
        for segment in self.passes:
            kv[segment.start :] = [segment.version] * (segment.end - segment.start)
            if any(version != segment.version for version in kv[: segment.start]):
                count += segment.end - segment.scored
        return count


@dataclass
class Claims:
    """The rollouts that can be replayed; for others, the reason why not."""

    whole: list[Claim] = field(default_factory=list)
    contradictions: dict[str, str] = field(default_factory=dict)
    """Rollout → the contradiction in its tags."""
    missing: Counter[int] = field(default_factory=Counter)
    """Version that was not kept → number of tokens that depend on it."""
    unchecked: Counter[str] = field(default_factory=Counter)
    """Other reasons → number of tokens."""
    continued: int = 0
    """Tokens of rollouts that lost a generator, which alone knew the version under which it had written their KV."""

    @classmethod
    def of(cls, rollouts: Iterable[Rollout], kept: KeptVersions, vocabulary: int = MAX_VOCABULARY) -> Claims:
        """Sorts rollouts by whether they can be replayed, by a model with a vocabulary of so many tokens."""
        claims = cls()
        for rollout in rollouts:
            claims._add(rollout, kept, vocabulary)
        return claims

    def _add(self, rollout: Rollout, kept: KeptVersions, vocabulary: int) -> None:
        length = len(rollout.turn.token_ids)
        try:
            passes = segments(rollout)
            if len(rollout.turn.logprobs) != length:
                raise TagError(f"{len(rollout.turn.logprobs)} log-probabilities for {length} tokens")
            if rollout.turn.kept is not None and len(rollout.turn.kept) != length:
                raise TagError(f"{len(rollout.turn.kept)} kept sets for {length} tokens")
            if strange := _strange_ids(rollout, vocabulary):
                raise TagError(f"token id {strange[0]}, and the model's vocabulary has {vocabulary} tokens")
        except TagError as error:
            self.contradictions[rollout.rollout_id] = str(error)
            return
        versions = {segment.version for segment in passes}
        absent = [version for version in sorted(versions - {UNKNOWN}) if not kept.has(version)]
        if UNKNOWN in versions and rollout.pieces:
            self.continued += length
        elif UNKNOWN in versions:
            self.unchecked["on KV whose version the engine did not know (shared prefix or external)"] += length
        elif absent:
            self.missing.update(dict.fromkeys(absent, length))
        else:
            self.whole.append(Claim(rollout, passes))


@dataclass(frozen=True, slots=True)
class ReplayedTokens:
    """All replayed tokens in a row, [N] each."""

    names: list[str]
    """Rollout ids that `rollout` counts into."""
    rollout: np.ndarray
    prompt: np.ndarray
    """Tokens of one prompt depend on each other: its samples share contexts, which an engine rounds equally."""
    index: np.ndarray
    version: np.ndarray
    cut: np.ndarray
    """Whether top-k or top-p took part in sampling the token and the kept set was not recorded."""
    recorded: np.ndarray
    replayed: np.ndarray

    @classmethod
    def of(cls, claims: Sequence[Claim], replayed: Iterable[Iterable[float]], cuts: bool) -> ReplayedTokens:
        """`cuts`: whether the run sampled with top-k, top-p or min-p."""
        lengths = [len(claim.versions) for claim in claims]
        prompts: dict[tuple[int, ...], int] = {}
        numbers = [prompts.setdefault(tuple(claim.rollout.prompt_ids), len(prompts)) for claim in claims]
        return cls(
            names=[claim.rollout.rollout_id for claim in claims],
            rollout=np.repeat(np.arange(len(claims)), lengths),
            prompt=np.repeat(np.array(numbers, dtype=int), lengths),
            index=np.concatenate([np.arange(length) for length in lengths] or [np.zeros(0, dtype=int)]),
            version=np.array([version for claim in claims for version in claim.versions], dtype=int),
            cut=np.array([cuts and not kept for claim in claims for kept in _kept(claim.rollout)], dtype=bool),
            recorded=np.array([value for claim in claims for value in claim.rollout.turn.logprobs], dtype=float),
            replayed=np.array(list(itertools.chain.from_iterable(replayed)), dtype=float),
        )

    def __len__(self) -> int:
        return len(self.recorded)

    @property
    def off(self) -> np.ndarray:
        """[N] absolute differences in nats; NaN counts as infinite."""
        off: np.ndarray = np.nan_to_num(np.abs(self.recorded - self.replayed), nan=np.inf)
        return off

    def misses(self, chosen: np.ndarray) -> Misses:
        """Those of the chosen tokens (bool [N]) with finite differences."""
        chosen = chosen & np.isfinite(self.recorded - self.replayed)
        size = np.abs(self.recorded - self.replayed)[chosen]
        return Misses(size, self.recorded[chosen], self.prompt[chosen])


def _strange_ids(rollout: Rollout, vocabulary: int) -> list[int]:
    turn = rollout.turn
    ids = (rollout.prompt_ids.values, turn.token_ids.values, *([] if turn.kept is None else [turn.kept.ids]))
    return [token for each in ids for token in each[(each < 0) | (each >= vocabulary)].tolist()]


def _kept(rollout: Rollout) -> Sequence[Sequence[int]]:
    return rollout.turn.kept or [()] * len(rollout.turn.token_ids)
