"""The CUDA shadow that becomes live by moving the live address range onto its memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from inflight.generator.shadow.arena import Arena
from inflight.generator.shadow.base import ArenaShadow, CudaShadow
from inflight.generator.shadow.cuda_plan import LoadWeights
from inflight.generator.shadow.layout import Layout
from inflight.generator.shadow.step_hooks import hook_forward, hook_logits
from inflight.weights.receive.shadow import TornWeights
from inflight.weights.transport import cuda


class RemapShadow(ArenaShadow):
    """A second physical set, which the live range is moved to.

    With `late=True` a swap only arms: `launch`, called at the head of the next forward pass, does it. Inputs of that
    pass are prepared by then while the step before still runs, so the device waits for the remap alone. And for less
    than that: what a step does after its last use of weights (`used`), sampling and copies, goes on beside the remap.
    """

    name = "remap"

    def __init__(self, arena: Arena, layout: Layout, load_weights: LoadWeights, *, whole: bool) -> None:
        super().__init__(arena, layout, load_weights, whole=whole)
        self._lock = threading.Lock()
        self._armed = False
        self._last_use = torch.cuda.Event()
        self._last_use_known = False
        self.late = False

    def ready(self, runner: Any) -> CudaShadow:
        """Has an armed swap done at the head of the next forward pass, where this runner has a place for that."""
        self.late = hook_forward(runner, self.launch)
        if self.late:
            hook_logits(runner.get_model(), self.used)
        return self

    def target(self) -> torch.Tensor:
        return self._arena.shadow

    def swap(self) -> float:
        """Seconds that the step loop stood still; 0 when it is armed only."""
        started = time.perf_counter()
        with self._lock:
            self._armed = True
            # An idle device has nothing to hide the remap behind, and perhaps no next step.
            if self.late and not torch.cuda.current_stream(self.device).query():
                return 0.0
            self._remap()
        return time.perf_counter() - started

    def launch(self) -> None:
        """Does an armed swap. The step loop's thread, right before a forward pass is launched."""
        if self._armed:
            with self._lock:
                if self._armed:
                    self._remap(behind=self._last_use if self._last_use_known else None)
        self._last_use_known = False

    def used(self) -> None:
        """All that uses the weights in this step is queued on the current stream. The step loop's thread."""
        self._last_use.record(torch.cuda.current_stream(self.device))
        self._last_use_known = True

    def settle(self) -> None:
        """Does a swap that no forward pass came to do (the engine is idle). Background thread."""
        try:
            if self._armed:
                cuda.bind(self.device)
                with self._lock:
                    if self._armed:
                        self._remap()
        except Exception as error:
            raise TornWeights(f"the swap before could not be done: {error}") from error
        super().settle()

    def _remap(self, behind: torch.cuda.Event | None = None) -> None:
        moved = self._arena.remap(behind=behind)
        self._armed = False
        self.last_gap_s = moved.move
