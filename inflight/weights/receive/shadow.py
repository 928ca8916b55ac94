"""The seam of a generator's second set of weights: filled while the live set decodes, then swapped at a step boundary.

live --begin--> filling --build--> built --swap--> live (the old live set becomes the next shadow)
                   \\--discard--\\--discard--> nothing left of it, live untouched
"""

from __future__ import annotations

import re
from typing import Protocol, Self

import torch

from inflight.messages import Manifest

MAX_SAID = 300
"""Characters of a loader's error that are passed on."""
_SENTENCE_ENDS = re.compile(r"\.\s|\n")


class TornWeights(RuntimeError):
    """The live weights may be parts of two versions: this rank must not be used before it is restarted."""


class SwapRefused(RuntimeError):
    """A swap to a version that this rank has not got ready; the live weights are untouched."""


class Unfit(ValueError):
    """The engine's model has no use for what a manifest describes; no version of that publisher can be loaded.

    The text names the parameter, in one line.
    """

    @classmethod
    def by_loader(cls, what: str, error: Exception) -> Self:
        """That vLLM's own loader does not take `what`. Loaders raise whatever they like, and some list all parameters
        after the first sentence: that list is left out."""
        said = _SENTENCE_ENDS.split(str(error).strip(), maxsplit=1)[0][:MAX_SAID] or type(error).__name__
        return cls(f"{what} does not fit the engine: {said}")


class Shadow(Protocol):
    """What the receiver (a background thread) and the worker (the step loop's thread) need of a shadow."""

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The uint8 buffer `[manifest.total_bytes]` into which the transport writes. Background thread.

        Raises TornWeights when the swap before, which may have been left for later, turns out to have failed, and Unfit
        when no bytes of this manifest can be loaded.
        """

    def build(self) -> None:
        """Makes the received bytes kernel-ready beside the live set, which is not touched. Background thread.

        Raises Unfit when a parameter of the engine is not covered by the manifest or has another shape or dtype.
        """

    def swap(self) -> float:
        """Makes the shadow live, between two forward passes, in the step loop's thread. Seconds that it took."""

    def discard(self) -> None:
        """Forgets what `begin` and `build` made; the live set stays."""
