"""What the server passes to the workers through vLLM's `additional_config["inflight"]`."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.config import BusConfig
from inflight.config.network import NetworkConfig

KEY = "inflight"
FIRST_ADAPTER = 1 << 20
"""The id, in vLLM, of the first of `Settings.adapters`; those that vLLM gives to adapters of its own count from 1."""
NO_VERSION = -1
"""Version tag of tokens that were sampled before a publisher's first version was committed."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The publisher's address and this generator's name; the defaults are for offline use."""

    endpoint: str = ""
    """Control socket of the publisher; empty: no publisher, weights come from files."""
    generator: str = "g0"
    version: int = 0
    """Version tag of tokens until the first commit."""
    heartbeat_s: float = 1.0
    dead_after_s: float = 30.0
    keys: str = ""
    """Folder of the CURVE keys, if the sockets use them."""
    network: NetworkConfig = NetworkConfig()
    """The address of this process's transports."""
    share_prefix_across_versions: bool = False
    """Read by the patched prefix cache."""
    swap: str = "auto"
    """The way to swap: GeneratorConfig.swap."""
    adapters: list[str] = []
    """Names of the LoRA adapters that have versions, and two slots, of their own; the base's weights then stay. What
    comes over `endpoint` are versions of the first."""

    @staticmethod
    def of(vllm_config: Any) -> Settings:
        """The settings of an engine. Raises ValueError that names an unknown field or one of the wrong type."""
        found = (vllm_config.additional_config or {}).get(KEY, {})
        try:
            return msgspec.convert(found, Settings)
        except msgspec.ValidationError as error:
            raise ValueError(f"additional_config[{KEY!r}]: {error}") from None

    def as_additional_config(self) -> dict[str, Any]:
        """These settings as vLLM's `additional_config`."""
        return {KEY: msgspec.to_builtins(self)}

    @property
    def adapter_ids(self) -> dict[str, int]:
        """The ids by which vLLM, its requests and `commit_weights` know the adapters."""
        return {name: FIRST_ADAPTER + number for number, name in enumerate(self.adapters)}

    @property
    def lineage(self) -> int:
        """Whose versions the publisher sends: an adapter's id, or 0 for all weights of the model."""
        return FIRST_ADAPTER if self.adapters else 0

    @property
    def bus(self) -> BusConfig:
        """The heartbeat options of the worker's link to the publisher."""
        return BusConfig(heartbeat_s=self.heartbeat_s, dead_after_s=self.dead_after_s, keys=self.keys)
