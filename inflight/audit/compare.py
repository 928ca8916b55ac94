"""The comparison itself: rollouts in, report out."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from inflight.audit.alternatives import Alternative, Previous, previous_of
from inflight.audit.evidence import Excess, Misses, Slope, estimate, excess, same_share, vote
from inflight.audit.replay import KeptVersions, Replayer, Stale
from inflight.audit.report import AuditReport, Story, VersionRow, row
from inflight.audit.segments import UNKNOWN, Segment, TagError, segments
from inflight.types import Rollout, versions_of_tokens

Judge = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Slope]
"""`estimate` or `vote`."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """A rollout and the passes that its tags claim."""

    rollout: Rollout
    passes: list[Segment]

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.rollout.prompt_ids, *self.rollout.turn.token_ids]

    @property
    def versions(self) -> list[int]:
        """[T]."""
        return versions_of_tokens(self.rollout.turn.token_versions, len(self.rollout.turn.token_ids))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """All replayed tokens in a row, [N] each."""

    names: list[str]
    """Rollout ids that `rollout` counts into."""
    rollout: np.ndarray
    prompt: np.ndarray
    """Tokens of one prompt depend on each other: its samples share contexts, which an engine rounds alike."""
    index: np.ndarray
    version: np.ndarray
    recorded: np.ndarray
    replayed: np.ndarray

    def misses(self, chosen: np.ndarray) -> Misses:
        """Of the chosen tokens (bool [N]), those with finite differences."""
        chosen = chosen & np.isfinite(self.recorded - self.replayed)
        size = np.abs(self.recorded - self.replayed)[chosen]
        return Misses(size, self.recorded[chosen], self.prompt[chosen])


class Auditor:
    """Replays rollouts and judges what comes out."""

    def __init__(self, replayer: Replayer, kept: KeptVersions) -> None:
        self._replayer, self._kept = replayer, kept

    def audit(
        self,
        rollouts: Sequence[Rollout],
        *,
        run: str,
        dtype: str,
        tolerance: float | None,
        alternatives: Sequence[Alternative],
        torn_tail: str | None = None,
    ) -> AuditReport:
        """The report of these rollouts. Raises AuditError when a version's file is damaged."""
        contradictions: dict[str, str] = {}
        missing: Counter[int] = Counter()
        unchecked: Counter[str] = Counter()
        claims = self._claims(rollouts, contradictions, missing, unchecked)
        tokens = self._replay(claims)
        swaps = sum(_changes(claim.versions) for claim in claims)
        previous = previous_of(segment.version for claim in claims for segment in claim.passes)
        # With next to no noise least squares would hang on the few tokens that a story moves most.
        judge = vote if self._replayer.rounds_alike or tolerance is not None else estimate
        return AuditReport(
            run=run,
            dtype=dtype,
            tolerance=tolerance,
            rollouts=len(claims),
            swaps=swaps,
            straddling_tokens=sum(len(claim.versions) for claim in claims if _changes(claim.versions)),
            mixed_kv_tokens=sum(_mixed(claim) for claim in claims),
            total=self._row(tokens, None, None) if len(tokens.recorded) else None,
            versions=self._rows(tokens),
            first=same_share(tokens.misses(tokens.index == 0)) if self._replayer.rounds_alike else None,
            stories=[self._story(each, claims, tokens, previous, judge) for each in alternatives],
            same=sorted(self._replayer.same),
            contradictions=contradictions,
            missing=dict(sorted(missing.items())),
            unchecked=dict(unchecked),
            torn_tail=torn_tail,
        )

    def _claims(
        self,
        rollouts: Iterable[Rollout],
        contradictions: dict[str, str],
        missing: Counter[int],
        unchecked: Counter[str],
    ) -> list[_Claim]:
        """Those that can be replayed; what can't is noted with its reason."""
        claims = []
        for rollout in rollouts:
            length = len(rollout.turn.token_ids)
            try:
                passes = segments(rollout)
                if len(rollout.turn.logprobs) != length:
                    raise TagError(f"{len(rollout.turn.logprobs)} log-probabilities for {length} tokens")
            except TagError as error:
                contradictions[rollout.rollout_id] = str(error)
                continue
            versions = {segment.version for segment in passes}
            absent = [version for version in sorted(versions - {UNKNOWN}) if not self._kept.has(version)]
            if UNKNOWN in versions:
                unchecked["on KV whose version the engine did not know (shared prefix or external)"] += length
            elif absent:
                missing.update(dict.fromkeys(absent, length))
            else:
                claims.append(_Claim(rollout, passes))
        return claims

    def _replay(self, claims: Sequence[_Claim]) -> _Tokens:
        replayed = self._logprobs(claims)
        lengths = [len(claim.versions) for claim in claims]
        prompts: dict[tuple[int, ...], int] = {}
        numbers = [prompts.setdefault(tuple(claim.rollout.prompt_ids), len(prompts)) for claim in claims]
        return _Tokens(
            names=[claim.rollout.rollout_id for claim in claims],
            rollout=np.repeat(np.arange(len(claims)), lengths),
            prompt=np.repeat(np.array(numbers, dtype=int), lengths),
            index=np.concatenate([np.arange(length) for length in lengths] or [np.zeros(0, dtype=int)]),
            version=np.array([version for claim in claims for version in claim.versions], dtype=int),
            recorded=np.array([value for claim in claims for value in claim.rollout.turn.logprobs], dtype=float),
            replayed=np.array(list(itertools.chain.from_iterable(replayed)), dtype=float),
        )

    def _logprobs(self, claims: Sequence[_Claim], stale: Stale | None = None) -> list[list[float]]:
        sequences = [(claim.tokens, claim.passes, claim.rollout.turn.kept or ()) for claim in claims]
        return self._replayer.replay(sequences, stale)

    def _rows(self, tokens: _Tokens) -> list[VersionRow]:
        """A row a version; the first one, which no swap has touched, is what the others' misses are compared with."""
        versions = [int(version) for version in np.unique(tokens.version)]
        if not versions:
            return []
        baseline = tokens.misses(tokens.version == versions[0])
        found: defaultdict[int, Excess | None] = defaultdict(lambda: None)
        if not self._replayer.rounds_alike:
            for version in versions[1:]:
                found[version] = excess(tokens.misses(tokens.version == version), baseline)
        return [self._row(tokens, version, found[version]) for version in versions]

    def _row(self, tokens: _Tokens, version: int | None, more: Excess | None) -> VersionRow:
        chosen = np.ones(len(tokens.version), dtype=bool) if version is None else tokens.version == version
        alike = same_share(tokens.misses(chosen)) if self._replayer.rounds_alike else None
        return row(
            version, tokens.names, tokens.rollout[chosen], tokens.index[chosen],
            tokens.recorded[chosen], tokens.replayed[chosen], more, alike,
        )  # fmt: skip

    def _story(
        self, alternative: Alternative, claims: Sequence[_Claim], tokens: _Tokens, previous: Previous, judge: Judge
    ) -> Story:
        """Replays what the alternative changes; everything else it does not tell apart from the tags."""
        retold: dict[int, _Claim] = {}
        for number, claim in enumerate(claims):
            rollout = alternative.retag(claim.rollout, previous)
            if rollout is not None:
                retold[number] = _Claim(rollout, segments(rollout))
        stale = Stale(alternative.stale, previous) if alternative.stale is not None else None
        other = tokens.replayed.copy()
        for number, logprobs in zip(retold, self._logprobs(list(retold.values()), stale), strict=True):
            other[tokens.rollout == number] = logprobs

        def over(chosen: np.ndarray) -> Slope:
            return judge(tokens.recorded[chosen], tokens.replayed[chosen], other[chosen], tokens.prompt[chosen])

        by_version = {int(v): over(tokens.version == v) for v in np.unique(tokens.version)}
        return Story(
            name=alternative.name,
            says=alternative.says,
            overall=over(np.ones(len(other), dtype=bool)),
            by_version={version: slope for version, slope in by_version.items() if slope.tokens},
        )


def _changes(versions: Sequence[int]) -> int:
    return sum(left != right for left, right in itertools.pairwise(versions))


def _mixed(claim: _Claim) -> int:
    """Tokens that were sampled on some KV of another version than theirs."""
    kv: list[int] = []
    count = 0
    for segment in claim.passes:
        kv[segment.start :] = [segment.version] * (segment.end - segment.start)
        if any(version != segment.version for version in kv[: segment.start]):
            count += segment.end - segment.scored
    return count
