"""Rewards that compare the text of a completion with a column, or with a pattern."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from typing import Any

from inflight.config import ConfigError, require

_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
"""A decimal number, with thousands separated by commas or not, and an exponent or none. An exponent alone is none: in
`1e5e1` the last number is 1."""
FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


@dataclass(frozen=True)
class ExactMatch:
    """1 where the completion is the column's text, 0 elsewhere; where the column holds a list, any of its texts.

    None where the column holds None. A whole number that the column holds as a float or a decimal is both of its texts,
    `12` and `12.0`: tables hold integers as floats where a row has none. A date or time is its text of ISO 8601.
    """

    column: str = "answer"
    pattern: str = ""
    """Where it is set, its last match is compared: the first group, or the whole match; no match gives 0."""
    ignore_case: bool = False
    strip: bool = True
    """Compare without the white space at both ends."""

    def __post_init__(self) -> None:
        compiled(self.pattern, "", "options.pattern")

    def __call__(self, /, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [self._one(text, wanted) for text, wanted in zip(completions, columns[self.column], strict=True)]

    def _one(self, text: str, wanted: Any) -> float | None:
        if wanted is None:
            return None
        found = last_match(self.pattern, text) if self.pattern else text
        if found is None:
            return 0.0
        right = wanted if isinstance(wanted, list | tuple) else [wanted]
        return float(any(self._plain(found) == self._plain(text) for each in right for text in _texts(each)))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


def _texts(value: Any) -> list[str]:
    """How a value may be written."""
    if isinstance(value, date | time):
        return [value.isoformat()]
    signals = isinstance(value, Decimal) and value.is_snan()  # raises where it is taken for a number
    whole = not signals and isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value)
    return [str(value), str(int(value))] if whole else [str(value)]


@dataclass(frozen=True)
class NumericMatch:
    """1 where the last number of the completion equals the column's, 0 elsewhere.

    The column holds a number, or text whose last number counts (`… #### 42`). None where it holds None.
    """

    column: str = "answer"
    pattern: str = ""
    """Where it is set, the number is looked for in its first group (or the whole match), in its last match."""
    tolerance: float = 1e-6
    """Relative to the column's number, and absolute for numbers below 1."""

    def __post_init__(self) -> None:
        compiled(self.pattern, "", "options.pattern")
        require(0 <= self.tolerance < math.inf, "options.tolerance", self.tolerance, "0 or more")

    def __call__(self, /, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [self._one(text, wanted) for text, wanted in zip(completions, columns[self.column], strict=True)]

    def _one(self, text: str, wanted: Any) -> float | None:
        if wanted is None:
            return None
        right = float(wanted) if isinstance(wanted, int | float) else last_number(str(wanted))
        if right is None or not math.isfinite(right):
            raise ValueError(f"column {self.column} holds no number: {str(wanted)[:100]!r}")
        looked_at = last_match(self.pattern, text) if self.pattern else text
        found = None if looked_at is None else last_number(looked_at)
        return float(found is not None and abs(found - right) <= self.tolerance * max(1.0, abs(right)))


@dataclass(frozen=True)
class Regex:
    """1 where the pattern is found in the completion, 0 elsewhere."""

    pattern: str
    flags: str = ""
    """Letters of Python's flags: i (ignore case), m (multiline), s (dot matches line ends), x (verbose)."""
    whole: bool = False
    """The pattern must match the whole completion."""
    _compiled: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(bool(self.pattern), "options.pattern", self.pattern, "a regular expression of a character or more")
        object.__setattr__(self, "_compiled", compiled(self.pattern, self.flags, "options.pattern"))

    def __call__(self, completions: Sequence[str]) -> list[float | None]:
        find = self._compiled.fullmatch if self.whole else self._compiled.search
        return [float(find(text) is not None) for text in completions]


def compiled(pattern: str, flags: str, place: str) -> re.Pattern[str]:
    """A regular expression. Raises ConfigError naming `place` when it is none, or for a flag that is not in FLAGS."""
    require(set(flags) <= FLAGS.keys(), "options.flags", flags, f"letters of {''.join(FLAGS)}")
    try:
        return re.compile(pattern, sum(FLAGS[each] for each in set(flags)))
    except re.error as error:
        raise ConfigError(f"{place}={pattern!r} is not a regular expression: {error}") from None


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the pattern's last match, the whole match where it has no group; None when nothing matches."""
    found = [match[1] if match.re.groups else match[0] for match in re.finditer(pattern, text)]
    return found[-1] if found else None


def last_number(text: str) -> float | None:
    """The last decimal number of a text; None when there is none, or none that a float holds."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    value = float(found[-1].replace(",", ""))
    return value if math.isfinite(value) else None
