"""Applies patches/vllm-X.patch to an installed vLLM or to a fork, and takes it back.

A patch is a plain git diff with full blob ids (`git diff --full-index`), so it can be applied to a fork by `git apply`.
The ids also tell, without any further file, whether a source is as vLLM shipped it, as the patch changes it, or
neither. Only files of known content are changed, so context is never guessed. vLLM itself is not imported here.
"""

from __future__ import annotations

from inflight.patching.diff import PatchError
from inflight.patching.sources import PatchState, apply, check, revert, supported_versions

__all__ = ["PatchError", "PatchState", "apply", "check", "revert", "supported_versions"]
