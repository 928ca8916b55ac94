"""Whether the installed vLLM carries inflight's patch, in a version that is new enough."""

from __future__ import annotations

import importlib.util

from inflight.config import ConfigError
from inflight.generator import hooks

NEEDS_PATCH = 3
"""Version of vLLM's patch from which on its answers have packed log-probabilities."""


def require_patched() -> None:
    """Raises ConfigError unless the installed vLLM carries inflight's patch."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed: pip install 'inflight[cpu]' or 'inflight[gpu]'")
    if importlib.util.find_spec("vllm.inflight_patch") is None:
        raise ConfigError("this vLLM can't tag tokens with weight versions yet, run: inflight patch apply")
    from vllm.inflight_patch import PATCH_VERSION

    if PATCH_VERSION < NEEDS_PATCH:
        raise ConfigError(
            f"this vLLM has version {PATCH_VERSION} of inflight's patch, and {NEEDS_PATCH} is needed: revert it with "
            "the release of inflight that applied it, or install vLLM anew, then run: inflight patch apply"
        )
    try:
        hooks.require("server")
    except hooks.HookChanged as error:
        raise ConfigError(str(error)) from None
