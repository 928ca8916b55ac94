"""The interface of a generator's second set of weights: filled while the live set decodes, then swapped.

live --begin--> filling --build--> built --swap--> live (the old live set becomes the next shadow)
                   \\--discard--\\--discard--> discarded, the live set untouched
"""

from __future__ import annotations

import re
from typing import Protocol, Self

import torch

from inflight.error_line import one_line
from inflight.messages import Manifest

MAX_SAID = 300
"""Most characters of a loader's error that are reported."""
_SENTENCE_ENDS = re.compile(r"\.\s|\n")


class TornWeights(RuntimeError):
    """The live weights may be parts of two versions: this rank must not be used before it is restarted."""


class SwapRefused(RuntimeError):
    """A swap to a version that this rank does not have ready; the live weights are untouched."""


class ManifestMismatch(ValueError):
    """The engine's model does not fit the manifest; no version of that publisher can be loaded.

    The text names the parameter, in one line.
    """

    @classmethod
    def by_loader(cls, what: str, error: Exception) -> Self:
        """For an error of vLLM's own loader with `what`. Loaders may raise anything, and some list all parameters after
        the first sentence: that list is omitted."""
        said = one_line(_SENTENCE_ENDS.split(str(error).strip(), maxsplit=1)[0], MAX_SAID) or type(error).__name__
        return cls(f"{what} does not fit the engine: {said}")


class Shadow(Protocol):
    """The methods that the receiver (a background thread) and the worker (the step loop's thread) use of a shadow."""

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The uint8 buffer `[manifest.total_bytes]` into which the transport writes. Background thread.

        Raises TornWeights when the previous swap, which may have been deferred, turns out to have failed, and
        ManifestMismatch when no bytes of this manifest can be loaded.
        """

    def build(self) -> None:
        """Makes the received bytes kernel-ready beside the live set, which is not touched. Background thread.

        Raises ManifestMismatch when a parameter of the engine is not covered by the manifest or has another shape or
        dtype.
        """

    def swap(self) -> float:
        """Makes the shadow live, between two forward passes, in the step loop's thread. Returns the seconds it took."""

    def discard(self) -> None:
        """Discards the result of `begin` and `build`; the live set stays."""
