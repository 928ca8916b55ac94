"""Numbers as a person reads them: three digits, durations, a row of blocks for a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.report.html import series

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as a row of block characters, scaled from minimum to maximum; "" for none."""
    shown = values[-width:]
    if not shown:
        return ""
    low = min(shown)
    high = max(shown)
    if high == low:
        return BLOCKS[0] * len(shown)
    return "".join(BLOCKS[int((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in shown)


def number(value: object) -> str:
    """Three significant digits of a real number; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def finite(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    known = series.number(value)
    return None if known is None else float(known)


def whole(value: Any) -> int | None:
    """An integer as it is; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def duration(seconds: float) -> str:
    """`4:05` for minutes and seconds, `2:04:05` with hours."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def milliseconds(seconds: object) -> str:
    """A duration in ms; `?` when it is not known."""
    value = finite(seconds)
    return "?" if value is None else f"{number(value * 1e3)} ms"
