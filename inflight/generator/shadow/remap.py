"""The CUDA shadow that becomes live by moving the live address range onto its memory: see arena.py."""

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
    """A second physical set, onto which the live range is moved.

    With `late=True` a swap only arms the remap, and `launch`, called at the start of the next forward pass, carries it
    out. By then the inputs of that pass are prepared, while the previous step was still running, so the device waits
    for the remap alone. It waits for less than the whole remap, because work of a step after its last use of weights
    (`used`: sampling and copies) runs beside the remap.
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
        """Has armed swaps carried out at the start of the next forward pass, if this runner can be hooked there."""
        self.late = hook_forward(runner, self.launch)
        if self.late:
            hook_logits(runner.get_model(), self.used)
        return self

    def target(self) -> torch.Tensor:
        return self._arena.shadow

    def swap(self) -> float:
        """Returns the seconds for which the step loop stalled; 0 when the remap is only armed."""
        started = time.perf_counter()
        with self._lock:
            self._armed = True
            # On an idle device no running step hides the remap, and there may be no next step.
            if self.late and not torch.cuda.current_stream(self.device).query():
                return 0.0
            self._remap()
        return time.perf_counter() - started

    def launch(self) -> None:
        """Carries out an armed swap. Called by the step loop's thread right before a forward pass is launched."""
        if self._armed:
            with self._lock:
                if self._armed:
                    self._remap(behind=self._last_use if self._last_use_known else None)
        self._last_use_known = False

    def used(self) -> None:
        """Called by the step loop's thread when all uses of the weights in this step are queued on the current
        stream."""
        self._last_use.record(torch.cuda.current_stream(self.device))
        self._last_use_known = True

    def settle(self) -> None:
        """Carries out a swap for which no forward pass came (the engine is idle). Called by a background thread. Raises
        TornWeights."""
        try:
            if self._armed:
                cuda.bind(self.device)
                with self._lock:
                    if self._armed:
                        self._remap()
        except Exception as error:
            raise TornWeights(f"the previous swap failed: {error}") from error
        super().settle()

    def _remap(self, behind: torch.cuda.Event | None = None) -> None:
        moved = self._arena.remap(behind=behind)
        self._armed = False
        self.last_gap_s = moved.move
