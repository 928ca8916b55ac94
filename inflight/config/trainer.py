"""How the trainer learns."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.checks import require_fields


@dataclass(frozen=True)
class TrainerConfig:
    """Optimization."""

    steps: int = 40
    groups_per_step: int = 4
    micro_batch: int = 8
    """Sequences per forward pass."""
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    warmup_steps: int = 0
    clip_low: float = 0.2
    clip_high: float = 0.2
    grad_clip: float = 1.0
    advantage_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO); else only the mean is taken off (Dr. GRPO)."""
    autocast: bool = True
    """Forward and backward in bfloat16, on a twin of the weights; master weights and optimizer stay float32."""
    threads: int = 1
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    batch_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        require_fields(self, "trainer", "steps groups_per_step micro_batch threads", least=1)
        names = "learning_rate weight_decay warmup_steps clip_low clip_high checkpoint_every"
        require_fields(self, "trainer", names, least=0)
        require_fields(self, "trainer", "grad_clip batch_timeout_s")
