"""The gate's rules on log-ratios, which are known only when the trainer has scored the tokens.

A rule is a pure function `(log_ratio [B, L], mask [B, L], *, options...) -> keep [B, L] bool`; `log_ratio`, without
gradient, is `logprob now - logprob recorded` and 0 outside `mask`. What is not kept takes no part in the loss, but has
been counted in its normalisation, which is known before the first token is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inflight.config import ConfigError
from inflight.named import find, with_options
from inflight.trainer.objectives.base import at_level, outside, ratio

RATIO_RULES = {
    name: f"inflight.trainer.ratio_rules:{name}" for name in ("token_ratio", "sequence_ratio", "geometric_ratio")
}
RatioRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, *, low: float = 0.0, high: float = 2.0) -> torch.Tensor:
    """Keeps tokens whose ratio is within the bounds."""
    return _within(log_ratio, low, high)


def sequence_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, *, low: float = 0.0, high: float = 2.0) -> torch.Tensor:
    """Keeps sequences the product of whose ratios is within the bounds."""
    return _within(at_level(log_ratio, mask, "sequence"), low, high)


def geometric_ratio(
    log_ratio: torch.Tensor, mask: torch.Tensor, *, low: float = 0.9, high: float = 1.1
) -> torch.Tensor:
    """Keeps sequences the geometric mean of whose ratios is within the bounds."""
    return _within(at_level(log_ratio, mask, "geometric"), low, high)


def ratio_rules_of(entries: Sequence[dict[str, Any]]) -> list[tuple[str, RatioRule]]:
    """The rules of `gate.ratio_rules` with the names they are counted by, each tried once on made-up tokens.

    Raises ConfigError naming a rule or an option that does not exist, or a rule that does not work.
    """
    found: list[tuple[str, RatioRule]] = []
    for index, entry in enumerate(entries):
        place = f"gate.ratio_rules[{index}]"
        options = {key: value for key, value in entry.items() if key != "name"}
        function = find(entry["name"], RATIO_RULES, f"{place}.name")
        rule = with_options(function, options, place)
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
        raise ConfigError(f"{place} does not give a bool for each token")


def _within(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ~outside(ratio(log_ratio), low, high)
