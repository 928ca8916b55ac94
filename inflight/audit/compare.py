"""The comparison of recorded with replayed log-probabilities: rollouts in, report out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from inflight.agreement import Agreement
from inflight.agreement import compare as compare_logprobs
from inflight.audit.alternatives import Alternative, Previous, previous_of
from inflight.audit.claims import Claim, Claims, ReplayedTokens
from inflight.audit.evidence import MIN_PROMPTS, Excess, Slope, estimate, excess, same_share, vote
from inflight.audit.replay import KeptVersions, Replayer, Stale
from inflight.audit.report import AuditReport, Completeness, Hypothesis, Unalike
from inflight.audit.rows import VersionRow, Worst, row
from inflight.audit.segments import segments
from inflight.types import Rollout

Judge = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Slope]
"""`estimate` or `vote`."""
RETRACED = 8
"""Rollouts that are retraced together when their tokens do not come out alike."""
MOST_RETRACED = 32
LEAST_TOKENS = 200
"""Fewest tokens of a version for judging it by itself."""


class Auditor:
    """Replays rollouts and judges the result."""

    def __init__(self, replayer: Replayer, kept: KeptVersions) -> None:
        self._replayer = replayer
        self._kept = kept

    def audit(
        self,
        rollouts: Sequence[Rollout],
        *,
        run: str,
        dtype: str,
        tolerance: float | None = None,
        alternatives: Sequence[Alternative],
        recorded_in: str = "bfloat16",
        complete: Completeness | None = None,
    ) -> AuditReport:
        """The report of these rollouts. `dtype` is that of the replay's computation, `recorded_in` the engine's (the
        coarsest if it is unknown). Raises AuditError when a version's file is damaged."""
        claims = Claims.of(rollouts, self._kept, self._replayer.vocabulary)
        whole = claims.whole
        sampling = self._replayer.sampling
        tokens = ReplayedTokens.of(whole, self._logprobs(whole), sampling.cuts)
        unalike = None
        if self._replayer.rounds_alike:
            tokens, unalike = self._retraced(tokens, whole, tolerance or 0.0)
        exact = self._replayer.rounds_alike or recorded_in == dtype == "float32"
        rule = _Rule(recorded_in if dtype == "float32" else dtype, sampling.temperature, tolerance)
        agreement = rule.agreement(tokens, np.ones(len(tokens), dtype=bool))
        previous = previous_of(segment.version for claim in whole for segment in claim.passes)
        # With almost no noise, least squares would depend on the few tokens that a hypothesis moves most.
        judge = vote if exact or tolerance is not None else estimate
        hidden = rule.hidden(tokens, self._replayer.rounds_alike)
        fits = agreement.agrees and not (unalike is not None and unalike.wrong)
        return AuditReport(
            run=run,
            dtype=dtype,
            recorded_in=recorded_in,
            exact=exact,
            tolerance=tolerance,
            hidden=hidden,
            rollouts=len(whole),
            prompts=len(np.unique(tokens.prompt)),
            swaps=sum(claim.swaps for claim in whole),
            straddling_tokens=sum(len(claim.versions) for claim in whole if claim.swaps),
            mixed_kv_tokens=sum(claim.mixed for claim in whole),
            agreement=agreement,
            worst=_worst(tokens, agreement.at) if agreement.at is not None else None,
            total=self._row(tokens, None, None, agreement) if len(tokens) else None,
            versions=self._rows(tokens, exact, rule),
            first=same_share(tokens.misses(tokens.index == 0)) if unalike is not None else None,
            unalike=unalike,
            hypotheses=[self._hypothesis(each, whole, tokens, previous, judge, fits) for each in alternatives],
            same=sorted(self._replayer.same),
            contradictions=claims.contradictions,
            missing=dict(sorted(claims.missing.items())),
            unchecked=dict(claims.unchecked),
            continued=claims.continued,
            complete=complete or Completeness(),
        )

    def _logprobs(self, claims: Sequence[Claim], stale: Stale | None = None) -> list[list[float]]:
        return self._replayer.replay([claim.sequence for claim in claims], stale)

    def _retraced(
        self, tokens: ReplayedTokens, claims: Sequence[Claim], tolerance: float
    ) -> tuple[ReplayedTokens, Unalike]:
        """Retraces the rollouts that do not come out alike, until one is found that no pass explains.

        The tokens then have the values of the passes that explain them.
        """
        wrong = np.unique(tokens.rollout[tokens.off > tolerance])
        replayed = tokens.replayed.copy()
        looked = 0
        for start in range(0, min(len(wrong), MOST_RETRACED), RETRACED):
            chosen = wrong[start : start + RETRACED]
            found = self._replayer.retrace(
                [claims[number].sequence for number in chosen],
                [claims[number].rollout.turn.logprobs for number in chosen],
            )
            for number, logprobs in zip(chosen, found, strict=True):
                looked += 1
                if logprobs is not None:
                    replayed[tokens.rollout == number] = logprobs
            if any(logprobs is None for logprobs in found):
                break
        tokens = replace(tokens, replayed=replayed)
        left = len(np.unique(tokens.rollout[tokens.off > tolerance]))
        unseen = len(wrong) - looked
        explained = left == unseen
        return tokens, Unalike(
            wrong=0 if explained else left, alone=len(wrong) - left, unknown=unseen if explained else 0
        )

    def _rows(self, tokens: ReplayedTokens, exact: bool, rule: _Rule) -> list[VersionRow]:
        """One row per version; the first, before any swap, is the baseline for the others' misses."""
        versions = [int(version) for version in np.unique(tokens.version)]
        if not versions:
            return []
        baseline = tokens.misses(tokens.version == versions[0])
        found: defaultdict[int, Excess | None] = defaultdict(lambda: None)
        if not exact:
            for version in versions[1:]:
                found[version] = excess(tokens.misses(tokens.version == version), baseline)
        return [
            self._row(tokens, version, found[version], rule.of_part(tokens, tokens.version == version))
            for version in versions
        ]

    def _row(
        self, tokens: ReplayedTokens, version: int | None, more: Excess | None, agreement: Agreement | None
    ) -> VersionRow:
        chosen = np.ones(len(tokens), dtype=bool) if version is None else tokens.version == version
        alike = same_share(tokens.misses(chosen)) if self._replayer.rounds_alike else None
        return row(
            version,
            tokens.names,
            tokens.rollout[chosen],
            tokens.index[chosen],
            tokens.recorded[chosen],
            tokens.replayed[chosen],
            more,
            alike,
            agreement,
        )

    def _hypothesis(
        self,
        alternative: Alternative,
        claims: Sequence[Claim],
        tokens: ReplayedTokens,
        previous: Previous,
        judge: Judge,
        fits: bool,
    ) -> Hypothesis:
        """Replays only what the alternative changes; the rest does not distinguish it from the tags."""
        retold: dict[int, Claim] = {}
        for number, claim in enumerate(claims):
            rollout = alternative.retag(claim.rollout, previous)
            if rollout is not None:
                retold[number] = Claim(rollout, segments(rollout))
        stale = Stale(alternative.stale, previous) if alternative.stale is not None else None
        other = tokens.replayed.copy()
        for number, logprobs in zip(retold, self._logprobs(list(retold.values()), stale), strict=True):
            other[tokens.rollout == number] = logprobs

        def over(chosen: np.ndarray) -> Slope:
            slope = judge(tokens.recorded[chosen], tokens.replayed[chosen], other[chosen], tokens.prompt[chosen])
            return Slope(slope=slope.slope, error=slope.error, tokens=slope.tokens, fits=fits)

        by_version = {int(v): over(tokens.version == v) for v in np.unique(tokens.version)}
        return Hypothesis(
            name=alternative.name,
            says=alternative.says,
            overall=over(np.ones(len(other), dtype=bool)),
            by_version={version: slope for version, slope in by_version.items() if slope.tokens},
        )


def _worst(tokens: ReplayedTokens, at: int) -> Worst:
    """One of the tokens, in the report's form."""
    return Worst(
        rollout_id=tokens.names[tokens.rollout[at]],
        index=int(tokens.index[at]),
        recorded=float(tokens.recorded[at]),
        replayed=float(tokens.replayed[at]),
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a run's tokens are compared as a whole."""

    dtype: str
    """The coarser dtype of record and replay."""
    temperature: float
    tolerance: float | None

    def agreement(self, tokens: ReplayedTokens, chosen: np.ndarray) -> Agreement:
        """That of the chosen tokens (bool [N])."""
        return compare_logprobs(
            tokens.recorded[chosen],
            tokens.replayed[chosen],
            self.dtype,
            temperature=self.temperature,
            prompt=tokens.prompt[chosen],
            cut=tokens.cut[chosen],
            most=self.tolerance,
        )

    def hidden(self, tokens: ReplayedTokens, alike: bool) -> str | None:
        """Why a single wrong token may hide within the tolerance: the difference that rounding does not explain."""
        if self.tolerance is None or not len(tokens):
            return None
        if alike:
            differ = int((tokens.off > 0).sum())
            return f"{differ} tokens do not come out alike" if differ else None
        problems = replace(self, tolerance=None).agreement(tokens, np.ones(len(tokens), dtype=bool)).problems
        return problems[0] if problems else None

    def of_part(self, tokens: ReplayedTokens, chosen: np.ndarray) -> Agreement | None:
        """None when there are too few tokens to judge a part of the run by itself."""
        enough = chosen.sum() >= LEAST_TOKENS and len(np.unique(tokens.prompt[chosen])) >= MIN_PROMPTS
        return self.agreement(tokens, chosen) if enough else None
