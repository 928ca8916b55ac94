"""The tokens of one version, compared: a row of the report."""

from __future__ import annotations

import msgspec
import numpy as np

from inflight.agreement import Agreement
from inflight.audit.evidence import Excess, Share


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The token with the largest difference."""

    rollout_id: str
    index: int
    """Index among the sampled tokens."""
    recorded: float
    replayed: float


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens sampled under one version; `version` is None for all of them. Differences are absolute, in nats."""

    version: int | None
    tokens: int
    p50: float
    p99: float
    p999: float
    max: float
    worst: Worst
    excess: Excess | None = None
    """Compared with the first version's tokens."""
    agreement: Agreement | None = None
    """Of recorded with replayed values; None when there are too few tokens to judge a version by itself."""
    same: Share | None = None
    """Set when the replay's kernels are the engine's."""


def row(
    version: int | None,
    names: list[str],
    rollout: np.ndarray,
    index: np.ndarray,
    recorded: np.ndarray,
    replayed: np.ndarray,
    excess: Excess | None = None,
    same: Share | None = None,
    agreement: Agreement | None = None,
) -> VersionRow:
    """The row of some tokens: `rollout` [N] indexes `names`; a difference that is NaN counts as infinite."""
    size = np.nan_to_num(np.abs(recorded - replayed), nan=np.inf)
    at = int(size.argmax())
    p50, p99, p999 = np.quantile(size, (0.5, 0.99, 0.999), method="higher")
    return VersionRow(
        version=version,
        tokens=len(size),
        p50=float(p50),
        p99=float(p99),
        p999=float(p999),
        max=float(size[at]),
        worst=Worst(
            rollout_id=names[rollout[at]],
            index=int(index[at]),
            recorded=float(recorded[at]),
            replayed=float(replayed[at]),
        ),
        excess=excess,
        same=same,
        agreement=agreement,
    )
