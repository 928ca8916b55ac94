"""How long TRL's trainer trains, what it weighs meanwhile, and what its log says of its time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Ends training after some seconds, counted from the first step, and keeps copies of the weights."""

    def __init__(self, seconds: float, every_s: float) -> None:
        self._seconds = seconds
        self._every_s = every_s
        self._began = 0.0
        self._next_s = every_s
        self.lasted_s = 0.0
        self.device = "cpu"
        self.snapshots: list[tuple[float, dict[str, torch.Tensor]]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The first one starts the clock."""
        self._began = self._began or time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
        """Copies the weights when it is time, and ends training when its time is over."""
        self.lasted_s = time.monotonic() - self._began
        over = self.lasted_s >= self._seconds
        if over or self.lasted_s >= self._next_s:
            self._next_s = self.lasted_s + self._every_s
            self.device = str(next(model.parameters()).device)
            weights = {name: each.detach().bfloat16() for name, each in model.named_parameters()}
            self.snapshots.append((self.lasted_s, {name: each.clone() for name, each in weights.items()}))
        control.should_training_stop = control.should_training_stop or over

    def figures(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """From TRL's own log, one entry per step: tokens per second, shares of time for waits and weight updates."""
        lasted = self.lasted_s or 1.0

        def total(name: str) -> float:
            return sum(float(entry.get(name) or 0.0) for entry in history)

        return {
            "seconds": self.lasted_s,
            "steps": len(history),
            "tokens_per_s": total("batch/trained_tokens_per_step") / lasted,
            "trainer_waits_share": total("perf/rollout_wait_s") / lasted,
            "publishing_share": total("perf/weight_sync_s") / lasted,
            "publish_ms": 1e3 * total("perf/weight_sync_s") / max(len(history), 1),
            "rewards": [entry.get("reward") for entry in history],
            "last_log": dict(history[-1]) if history else {},
        }
