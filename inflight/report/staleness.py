"""What age did to the tokens of a run: figures by lag and by version, from the lines of metrics.jsonl.

The row of lag 0 is the noise floor: both sides had the same weights there, so it shows the difference between two
implementations. What the other rows show beyond it is age.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one lag, or of one version, over a whole run; means over those that were trained on."""

    key: int
    tokens: int
    gated_share: float
    """Of all sampled tokens."""
    log_ratio_mean: float
    """Log-probability when trained on less that when sampled."""
    log_ratio_std: float
    log_ratio_max: float
    """Largest absolute value."""
    tail_share: float
    """Tokens whose probability had doubled or halved."""
    ess: float
    """Effective sample size of the importance weights, as a share of the tokens."""
    kl: float
    """Estimate of KL(when sampled || when trained on), nats."""
    clip_share: float
    entropy: float
    not_finite: int = 0
    """Further tokens, of steps in which one of these figures was no finite number."""


def by_lag(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row for each lag, ascending."""
    return _rows((int(lag), row) for line in lines for lag, row in line.get("by_lag", {}).items())


def by_version(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row for each version that sampled tokens, ascending. Step s trains at version s - 1."""
    return _rows(
        (int(line["version"]) - 1 - int(lag), row) for line in lines for lag, row in line.get("by_lag", {}).items()
    )


def table(rows: Sequence[Row], key: str) -> str:
    """The rows for a person; `key` heads the first column. Empty when there are none."""
    if not rows:
        return ""
    head = [key, "tokens", "gated", "log-ratio", "± std", "max", "tail", "ESS", "KL", "clip", "entropy"]
    lines = [head] + [
        [
            str(row.key),
            str(row.tokens),
            f"{row.gated_share:.1%}",
            f"{row.log_ratio_mean:+.4f}",
            f"{row.log_ratio_std:.4f}",
            f"{row.log_ratio_max:.3g}",
            f"{row.tail_share:.2%}",
            f"{row.ess:.3f}",
            f"{row.kl:.2e}",
            f"{row.clip_share:.2%}",
            f"{row.entropy:.3f}",
        ]
        for row in rows
    ]
    if any(row.not_finite for row in rows):
        lines = [
            [*line, cell]
            for line, cell in zip(lines, ["not finite", *(str(row.not_finite) for row in rows)], strict=True)
        ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(" ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _rows(given: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Row]:
    collected: dict[int, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for key, row in given:
        collected[key].append(row)
    return [_merge(key, rows) for key, rows in sorted(collected.items())]


def _merge(key: int, given: Sequence[Mapping[str, Any]]) -> Row:
    """Means are weighed by tokens; deviation and effective sample size are taken over all tokens of all rows."""
    rows = [row for row in given if None not in row.values()]  # null is what metrics write for NaN and infinity
    tokens = sum(row["tokens"] for row in rows)
    n = max(tokens, 1.0)

    def mean(name: str) -> float:
        return float(sum(row[name] * row["tokens"] for row in rows) / n)

    gated = sum(row["gated"] for row in rows)
    square = sum((row["log_ratio_std"] ** 2 + row["log_ratio_mean"] ** 2) * row["tokens"] for row in rows) / n
    weights = sum(row["weight_mean"] * row["tokens"] for row in rows)
    squares = sum((row["weight_mean"] ** 2 * row["tokens"]) / row["ess"] for row in rows if row["ess"])
    return Row(
        key=key,
        tokens=int(tokens),
        gated_share=gated / max(gated + tokens, 1.0),
        log_ratio_mean=mean("log_ratio_mean"),
        log_ratio_std=math.sqrt(max(square - mean("log_ratio_mean") ** 2, 0.0)),
        log_ratio_max=max((row["log_ratio_max"] for row in rows), default=0.0),
        tail_share=mean("tail_share"),
        ess=weights**2 / (n * squares) if squares else 0.0,
        kl=mean("kl"),
        clip_share=mean("clip_share"),
        entropy=mean("entropy"),
        not_finite=int(sum((row["tokens"] or 0) + (row["gated"] or 0) for row in given if None in row.values())),
    )
