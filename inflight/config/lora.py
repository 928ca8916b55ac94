"""The LoRA adapter that a run trains instead of all weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from inflight.config.checks import require, require_fields

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's slots."""
UNSUPPORTED = ("embed_tokens", "lm_head", "experts", "gate", "router", "norm", "score", "classifier")
"""Modules, or parts of their names, whose adapters generators do not swap."""


@dataclass(frozen=True)
class LoraConfig:
    """An adapter (Hu et al., https://arxiv.org/abs/2106.09685) over a base whose weights stay, as PEFT computes it."""

    rank: int = 0
    """Of each pair of matrices; 0: no adapter, all weights are trained."""
    alpha: float = 0.0
    """The adapter's output is scaled by alpha / rank; 0: alpha is the rank."""
    rslora: bool = False
    """Scaled by alpha / sqrt(rank) instead (Kalajdzievski, https://arxiv.org/abs/2312.03732)."""
    target_modules: list[str] = field(default_factory=list)
    """Names of linear layers as PEFT takes them, such as `q_proj`; empty: all but the output layer."""
    name: str = "policy"
    """What requests to the generators call it (`model` in the OpenAI API); the base has `model.served_name`."""

    def __post_init__(self) -> None:
        require_fields(self, "trainer.lora", "rank", least=0, most=RANKS[-1])
        require_fields(self, "trainer.lora", "alpha", least=0)
        fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name) is not None
        require(fits, "trainer.lora.name", self.name, "letters, digits, dots, dashes and underscores, 64 at most")
        for module in self.target_modules:
            swapped = module.rpartition(".")[2] not in UNSUPPORTED and "experts" not in module
            require(swapped, "trainer.lora.target_modules", module, "linear layers of attention and MLP")

    @property
    def scaling(self) -> float:
        """What B's output is multiplied by."""
        return (self.alpha or self.rank) / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def slot_rank(self) -> int:
        """The rank of vLLM's slots that this adapter fits into."""
        return next(size for size in RANKS if size >= (self.rank or 16))
