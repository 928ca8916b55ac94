"""What the server tells the workers through vLLM's `additional_config["inflight"]`."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.config import BusConfig

KEY = "inflight"
NO_VERSION = -1
"""Stamp of tokens that were sampled before a publisher's first version was committed."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the publisher listens and who this generator is; all absent for offline use."""

    endpoint: str = ""
    """Control socket of the publisher; empty: no publisher, weights come from files."""
    generator: str = "g0"
    version: int = 0
    """What tokens are stamped with until the first commit."""
    heartbeat_s: float = 1.0
    dead_after_s: float = 30.0
    keys: str = ""
    """Folder of the CURVE keys, where the sockets use some."""
    share_prefix_across_versions: bool = False
    """Read by the patched prefix cache."""
    swap: str = "auto"
    """How the shadow becomes live: GeneratorConfig.swap."""

    @staticmethod
    def of(vllm_config: Any) -> Settings:
        """The settings of an engine. Raises ValueError naming a field that is unknown or of the wrong type."""
        found = (vllm_config.additional_config or {}).get(KEY, {})
        try:
            return msgspec.convert(found, Settings)
        except msgspec.ValidationError as error:
            raise ValueError(f"additional_config[{KEY!r}]: {error}") from None

    def as_additional_config(self) -> dict[str, Any]:
        """The value for vLLM's `additional_config`."""
        return {KEY: msgspec.to_builtins(self)}

    @property
    def bus(self) -> BusConfig:
        """Heartbeats of the worker's link to the publisher."""
        return BusConfig(heartbeat_s=self.heartbeat_s, dead_after_s=self.dead_after_s, keys=self.keys)
