"""Whether a mathematical answer equals the right one, by math-verify (`pip install 'inflight[math]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.config import ConfigError, require


@dataclass(frozen=True)
class Math:
    """1 where the completion's answer equals the column's as mathematics, 0 elsewhere.

    Answers are found in LaTeX (`\\boxed{…}`, `$…$`) and in plain expressions. None where the column holds None, or
    nothing that math-verify can read. The time of a comparison is bounded by `rollout.reward_timeout_s`.
    """

    column: str = "answer"
    boxed: bool = False
    """Accept only an answer in `\\boxed{…}`."""
    precision: int = 6
    """Decimal places that numbers are compared to."""
    _library: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(0 <= self.precision <= 30, "options.precision", self.precision, "0 to 30 decimal places")
        try:
            import math_verify
        except ImportError:
            raise ConfigError("it needs math-verify: pip install 'inflight[math]'") from None
        object.__setattr__(self, "_library", math_verify)

    def __call__(self, /, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [self._one(text, right) for text, right in zip(completions, columns[self.column], strict=True)]

    def _one(self, text: str, right: Any) -> float | None:
        gold = [] if right is None else self._gold(str(right))
        if not gold:
            return None
        # The library's own timeouts are signals, which a reward in a thread could not take.
        answer = self._library.parse(text, self._targets(self.boxed), parsing_timeout=None)
        verdict = self._library.verify(gold, answer, float_rounding=self.precision, timeout_seconds=None)
        return float(verdict)

    def _gold(self, text: str) -> list[Any]:
        """The right answer; LaTeX without the dollars around it is read, too."""
        for written in (text, f"${text}$"):
            if found := self._library.parse(written, self._targets(False), parsing_timeout=None):
                return list(found)
        return []

    def _targets(self, boxed: bool) -> list[Any]:
        if boxed:
            return [self._library.LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)]
        return [
            self._library.LatexExtractionConfig(boxed_match_priority=0),
            self._library.ExprExtractionConfig(),
        ]
