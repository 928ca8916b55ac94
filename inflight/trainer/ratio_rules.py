"""The gate's rules on log-ratios, which can be applied only after the trainer has scored the tokens.

A rule is a pure function `(log_ratio [B, L], mask [B, L], *, options...) -> keep [B, L] bool`; `log_ratio`, without
gradient, is `logprob now - logprob recorded` and 0 outside `mask`. Tokens that are not kept are excluded from the loss,
but count in its normalisation, which is computed before the first token is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inflight.config import ConfigError
from inflight.named import of_entry
from inflight.trainer.objectives.base import at_level, outside, ratio

RATIO_RULES = {
    name: f"inflight.trainer.ratio_rules:{name}" for name in ("token_ratio", "sequence_ratio", "geometric_ratio")
}
RatioRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, *, low: float = 0.0, high: float = 2.0) -> torch.Tensor:
    """Keeps tokens whose ratio is within the bounds."""
    return _within(log_ratio, low, high)


def sequence_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, *, low: float = 0.0, high: float = 2.0) -> torch.Tensor:
    """Keeps sequences whose product of ratios is within the bounds."""
    return _within(at_level(log_ratio, mask, "sequence"), low, high)


def geometric_ratio(
    log_ratio: torch.Tensor, mask: torch.Tensor, *, low: float = 0.9, high: float = 1.1
) -> torch.Tensor:
    """Keeps sequences whose geometric mean of ratios is within the bounds."""
    return _within(at_level(log_ratio, mask, "geometric"), low, high)


def ratio_rules_of(entries: Sequence[dict[str, Any]]) -> list[tuple[str, RatioRule]]:
    """The rules of `gate.ratio_rules`, with the names by which they are counted, each tried once on dummy tokens.

    Raises ConfigError that names an unknown rule or option, or a rule that fails.
    """
    found: list[tuple[str, RatioRule]] = []
    for index, entry in enumerate(entries):
        place = f"gate.ratio_rules[{index}]"
        rule = of_entry(entry, RATIO_RULES, place)
        _try(rule, f"{place} {entry['name']}")
        found.append((entry["name"], rule))
    return found


def _try(rule: RatioRule, place: str) -> None:
    log_ratio = torch.zeros(2, 3)
    try:
        keep = rule(log_ratio, log_ratio == 0)
    except Exception as error:  # noqa: BLE001 - a rule may be foreign code
        raise ConfigError(f"{place}: {error}") from None
    if not isinstance(keep, torch.Tensor) or keep.shape != log_ratio.shape or keep.dtype is not torch.bool:
        raise ConfigError(f"{place} does not return a bool for each token")


def _within(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ~outside(ratio(log_ratio), low, high)
