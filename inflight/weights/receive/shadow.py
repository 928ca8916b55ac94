"""The seam of a generator's second set of weights: filled while the live set decodes, then swapped at a step boundary.

live --begin--> filling --build--> built --swap--> live (the old live set becomes the next shadow)
                   \\--discard--\\--discard--> nothing left of it, live untouched
"""

from __future__ import annotations

from typing import Protocol

import torch

from inflight.messages import Manifest


class TornWeights(RuntimeError):
    """The live weights may be parts of two versions: this rank must not be used before it is restarted."""


class Shadow(Protocol):
    """What the receiver (a background thread) and the worker (the step loop's thread) need of a shadow."""

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The uint8 buffer `[manifest.total_bytes]` into which the transport writes. Background thread.

        Raises TornWeights when the swap before, which may have been left for later, turns out to have failed.
        """

    def build(self) -> None:
        """Makes the received bytes kernel-ready beside the live set, which is not touched. Background thread.

        Raises when a parameter of the engine is not covered by the manifest or has another shape or dtype; the text
        names it.
        """

    def swap(self) -> float:
        """Makes the shadow live, between two forward passes, in the step loop's thread. Seconds that it took."""

    def discard(self) -> None:
        """Forgets what `begin` and `build` made; the live set stays."""
