"""The gate's rules on log-ratios, which are known only when the trainer has scored the tokens.

A rule is a pure function `(log_ratio [B, L], mask [B, L], *, options...) -> keep [B, L] bool`; `log_ratio`, without
gradient, is `logprob now - logprob recorded` and 0 outside `mask`. What is not kept takes no part in the loss, but has
been counted in its normalisation, which is known before the first token is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inflight.named import find, with_options
from inflight.trainer.objectives.base import at_level, ratio

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
    """The rules of `gate.ratio_rules` with the names they are counted by. Raises ConfigError as `named.find` does."""
    found: list[tuple[str, RatioRule]] = []
    for index, entry in enumerate(entries):
        place = f"gate.ratio_rules[{index}]"
        options = {key: value for key, value in entry.items() if key != "name"}
        function = find(entry["name"], RATIO_RULES, f"{place}.name")
        found.append((entry["name"], with_options(function, options, place)))
    return found


def _within(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    ratios = ratio(log_ratio)
    return (ratios >= low) & (ratios <= high)
