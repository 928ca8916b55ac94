"""The slot numbers that vLLM's LoRA kernels on CUDA read, changed on the device when two slots are exchanged.

vLLM derives them from its table of slots whenever that table or the batch has changed, and waits for the device twice
to do so (`LoRAKernelMeta.prepare_tensors` reads a result on the host). The host then no longer runs a step ahead of the
device: about 5 ms of a 7B model's decoding at each swap (08a4170 in bench/log/2026-11-29.md). The numbers of two slots
can instead be exchanged where they lie, by kernels on the step's own stream, without any wait.

vLLM groups a batch's rows by slot. The groups keep their places, each under its new number: their order has no meaning
for the kernels.
"""

from __future__ import annotations

from typing import Any

import torch

NONE = -1
"""The slot number of rows without an adapter."""


class SlotNumbers:
    """Exchanges two slots' numbers in vLLM's tensors."""

    def __init__(self, manager: Any, slots: tuple[int, int], device: torch.device) -> None:
        """`manager` is vLLM's LoRAModelManager, whose table `lora_index_to_id` has one entry a slot."""
        self._manager = manager
        first, second = (1 + slot for slot in slots)
        numbers = torch.arange(NONE, len(manager.lora_index_to_id), device=device)
        numbers[[first, second]] = numbers[[second, first]]
        self._exchanged = {dtype: numbers.to(dtype) for dtype in (torch.int32, torch.int64)}
        """int `[1 + slots]`: at 1 + a slot's number, its number after the exchange."""

    def exchange(self, before: tuple[int | None, ...]) -> None:
        """Queues the exchange on the current stream; `before` is the table of slots before it, and vLLM's table holds
        the new one.

        Numbers that vLLM has not derived from `before` are left to it: it derives them anew at the next step.
        """
        manager = self._manager
        if manager._last_mapping is None or manager._last_slot_layout != before:
            return
        for wrapper in manager.punica_wrapper_mapping.values():
            rows, samples = wrapper.indices_len[:2]
            self._apply(wrapper._token_lora_indices[:rows])
            self._apply(wrapper._sampler_indices[:samples])
            for kernels, count in ((wrapper.token_mapping_meta, rows), (wrapper.prompt_mapping_meta, samples)):
                if not kernels.no_lora_flag_cpu[0]:  # else the tensors hold nothing, and no kernel reads them
                    self._apply(kernels.token_lora_mapping[:count])
                    self._apply(kernels.active_lora_ids)
        manager._last_slot_layout = tuple(manager.lora_index_to_id)

    def _apply(self, numbers: torch.Tensor) -> None:
        numbers.copy_(self._exchanged[numbers.dtype].index_select(0, numbers + 1))
