"""What the workers of an engine share whose LoRA adapters change and whose base stays (see shadow/slots.py).

Each adapter of `Settings.adapters` has a line of versions of its own, named by the adapter's id in `commit_weights` and
`stage_weights`. A publisher's versions are those of the first.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from inflight.base_digest import base_digest
from inflight.generator import hooks
from inflight.generator.settings import Settings
from inflight.generator.shadow.limits import UnsupportedModel, refuse
from inflight.generator.shadow.slots import BASE, SlotShadow, hold
from inflight.generator.worker.base import InflightWorkerMixin
from inflight.generator.worker.staging import Staging
from inflight.weights.receive.shadow import SwapRefused

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PATCH_VERSION = 2
"""Of vLLM's patch, the first that has versions of adapters."""


class AdapterWorkerMixin(InflightWorkerMixin):
    """A worker class puts it before vLLM's own worker and sets `inflight_device`."""

    inflight_device: str
    """CPU or CUDA, as in shadow/limits.py."""
    inflight_adapters: dict[int, SlotShadow]
    """By the adapter's id."""
    _stagings: dict[int, Staging]
    _base: Future[str] | None
    """The digest of the base's weights, in a rank that compares it."""

    if TYPE_CHECKING:
        device: Any
        local_rank: int

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(with_slots(vllm_config, self._spare), *args, **kwargs)  # type: ignore[call-arg]

    @property
    def _spare(self) -> int:
        """Slots beside those of adapters: one for the base's rows on CPU (slots.BASE)."""
        return int(self.inflight_device == "CPU")

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads as vLLM does; the base has no shadow. Raises UnsupportedModel for an engine that can't be served."""
        hooks.require("adapters")
        require_patch()
        refuse(self.vllm_config, self.inflight_device)
        super(InflightWorkerMixin, self).load_model(*args, **kwargs)  # type: ignore[misc]
        # Beside vLLM's warm-up, which takes longer; of the ranks of a host one is enough, as they read the same files.
        compared = bool(Settings.of(self.vllm_config).endpoint) and self.local_rank == 0
        self._base = ThreadPoolExecutor(1, "inflight base").submit(self._find_base) if compared else None

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, which clears all slots at its end; then the adapters take theirs and the receiver starts."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        settings = Settings.of(self.vllm_config)
        manager = self.model_runner.lora_manager._adapter_manager
        if self._spare:
            hold(manager, BASE, manager.lora_slots - 1)
        base = None if self._base is None else self._base.result()
        self.inflight_adapters = {
            adapter: SlotShadow(manager, adapter, manager.device, base) for adapter in settings.adapter_ids.values()
        }
        self._stagings = {adapter: Staging(shadow) for adapter, shadow in self.inflight_adapters.items()}
        self.inflight_shadow = self.inflight_adapters[settings.lineage]
        if settings.endpoint:
            self.inflight_receiver = self._start_receiver(settings)
        return times

    def _find_base(self) -> str:
        """The digest of the base's weights; empty when they were not read from files. Raises UnsupportedModel when the
        files can't be read."""
        folder = Path(self.vllm_config.model_config.model)
        if self.vllm_config.load_config.load_format == "dummy" or not folder.is_dir():
            return ""
        try:
            return base_digest(folder)
        except (ValueError, OSError, SafetensorError) as error:
            raise UnsupportedModel(f"the digest of the adapter's base can't be computed: {error}") from None

    def commit_weights(self, version: int, adapter: int = 0) -> dict[str, Any]:
        """RPC: as the mixin's, for one adapter."""
        return self._answer(version, partial(self._swap_adapter, version, adapter))

    def stage_weights(self, path: str, version: int, wait: bool = True, adapter: int = 0) -> None:
        """RPC: as the mixin's, for one adapter. The file holds `*.lora_A.weight` and `*.lora_B.weight` as PEFT names
        them, with B scaled already (trainer/adapter.py)."""
        self._require_files()
        self._staged(adapter).stage(Path(path), version, wait=wait)

    def staged_version(self, adapter: int = 0) -> int | None:
        """RPC: as the mixin's, for one adapter."""
        return self._staged(adapter).staged()

    def _swap_adapter(self, version: int, adapter: int) -> None:
        if self.inflight_receiver is None:
            self._staged(adapter).swap(version, self.rank)
        elif adapter == Settings.of(self.vllm_config).lineage:
            self.inflight_receiver.swap(version)
        else:
            raise SwapRefused(f"the publisher sends no versions of adapter {adapter}")

    def _staged(self, adapter: int) -> Staging:
        if adapter not in self._stagings:
            raise SwapRefused(f"adapter {adapter} has no versions: {', '.join(map(str, self._stagings))} have")
        return self._stagings[adapter]


def with_slots(vllm_config: VllmConfig, spare: int = 0) -> VllmConfig:
    """The configuration with a second slot for each adapter that has versions, and `spare` ones. Where vLLM may load
    adapters of its own, it has `max_loras` slots for them: its scheduler admits as many to a step when none with
    versions is in it, and does not know that those keep their slots. A copy: the scheduler keeps its own configuration,
    also where it lives in the same process.

    Raises UnsupportedModel when vLLM is to have no adapters, or no adapter is named.
    """
    trained = len(Settings.of(vllm_config).adapters)
    lora = vllm_config.lora_config
    if lora is None or not trained:
        raise UnsupportedModel("a worker of adapters needs enable_lora, and their names in its settings")
    if trained > lora.max_loras:
        raise UnsupportedModel(f"max_loras={lora.max_loras} has no place for {trained} adapters with versions")
    further = (trained if lora.max_loras == trained else 2 * trained) + spare
    widened = copy.copy(vllm_config)
    widened.lora_config = copy.copy(lora)
    widened.lora_config.max_loras += further
    widened.lora_config.max_cpu_loras += further
    return widened


def require_patch() -> None:
    """Raises UnsupportedModel for a patch of vLLM that knows no versions of adapters."""
    from vllm import inflight_patch

    if inflight_patch.PATCH_VERSION < PATCH_VERSION:
        raise UnsupportedModel("this vLLM can't tag tokens with an adapter's versions: revert and apply inflight patch")
