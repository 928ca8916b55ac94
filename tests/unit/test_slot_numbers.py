"""Exchanging slot numbers in vLLM's LoRA kernel tensors equals what vLLM itself derives from the exchanged table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from inflight.generator.shadow.slot_numbers import SlotNumbers

TABLE = [7, None, 7 + (1 << 19), 9]
OURS = (0, 2)
ROWS = 12


def kernel_tensors() -> ModuleType:
    """The module of LoRAKernelMeta, without its package, whose kernels need a GPU."""
    path = Path(next(iter(vllm.__path__))) / "lora/ops/triton_ops/lora_kernel_metadata.py"
    spec = importlib.util.spec_from_file_location("lora_kernel_metadata", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["lora_kernel_metadata"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Wrapper(PunicaWrapperBase):
    """vLLM's bookkeeping of slot numbers as PunicaWrapperGPU does it, on the host."""

    def __init__(self) -> None:
        super().__init__(ROWS, ROWS, "cpu")
        make = kernel_tensors().LoRAKernelMeta.make
        self.token_mapping_meta = make(len(TABLE), ROWS, "cpu")
        self.prompt_mapping_meta = make(len(TABLE), ROWS, "cpu")

    def update_metadata(self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int, **_: Any) -> None:
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.token_mapping_meta.prepare_tensors(self.token_lora_indices)
        self.prompt_mapping_meta.prepare_tensors(self.sampler_indices)


Wrapper.__abstractmethods__ = frozenset()  # the kernels, which no test calls


def derived(table: list[int | None], mapping: LoRAMapping) -> Any:
    """A manager whose wrapper holds what vLLM derives from a table."""
    wrapper = Wrapper()
    wrapper.update_metadata(mapping, table, len(table) + 1, 100)
    return SimpleNamespace(
        lora_index_to_id=list(table),
        punica_wrapper_mapping={"": wrapper},
        _last_mapping=mapping,
        _last_slot_layout=tuple(table),
    )


def read(wrapper: Wrapper, rows: int, samples: int) -> list[Any]:
    """What kernels compute with: each row's slot, and the rows of each group with the group's slot."""
    seen: list[Any] = [wrapper.token_lora_indices.tolist(), wrapper.sampler_indices.tolist()]
    for kernels, count in ((wrapper.token_mapping_meta, rows), (wrapper.prompt_mapping_meta, samples)):
        if kernels.no_lora_flag_cpu[0]:
            seen.append("no adapter")
            continue
        order, starts = kernels.token_indices_sorted_by_lora_ids.tolist(), kernels.lora_token_start_loc.tolist()
        groups = {
            slot: sorted(order[starts[place] : starts[place] + size])
            for place, (slot, size) in enumerate(
                zip(kernels.active_lora_ids.tolist(), kernels.num_tokens_per_lora.tolist(), strict=True)
            )
            if size
        }
        seen += [kernels.token_lora_mapping[:count].tolist(), groups]
    return seen


@pytest.mark.parametrize(
    ("tokens", "samples"),
    [
        ((7, 7, 7), (7, 7, 7)),
        ((7, 0, 9, 7), (7, 0, 9, 7)),
        ((9, 9, 9, 0, 7, 7), (9, 0, 7)),
        ((0, 9), (0, 9)),
        ((0, 0), (0, 0)),
        ((7, 7, 7, 0), (0,)),
    ],
)
def test_exchanged_numbers_are_those_vllm_derives(tokens: tuple[int, ...], samples: tuple[int, ...]) -> None:
    mapping = LoRAMapping(tokens, samples, is_prefill=True)
    after = [TABLE[2], None, TABLE[0], 9]
    wanted = read(derived(after, mapping).punica_wrapper_mapping[""], len(tokens), len(samples))
    manager = derived(TABLE, mapping)
    numbers = SlotNumbers(manager, OURS, torch.device("cpu"))
    manager.lora_index_to_id = list(after)
    numbers.exchange(tuple(TABLE))
    assert read(manager.punica_wrapper_mapping[""], len(tokens), len(samples)) == wanted
    assert manager._last_slot_layout == tuple(after), "vLLM has nothing to derive"
    # There and back.
    manager.lora_index_to_id = list(TABLE)
    numbers.exchange(tuple(after))
    back = read(derived(TABLE, mapping).punica_wrapper_mapping[""], len(tokens), len(samples))
    assert read(manager.punica_wrapper_mapping[""], len(tokens), len(samples)) == back


@pytest.mark.parametrize("layout", [None, (7, 1, 2, 3)])
def test_numbers_of_another_table_are_left_to_vllm(layout: tuple[int, ...] | None) -> None:
    mapping = LoRAMapping((7, 9), (7, 9), is_prefill=False)
    manager = derived(TABLE, mapping)
    numbers = SlotNumbers(manager, OURS, torch.device("cpu"))
    manager._last_slot_layout = layout
    before = read(manager.punica_wrapper_mapping[""], 2, 2)
    numbers.exchange(tuple(TABLE))
    assert read(manager.punica_wrapper_mapping[""], 2, 2) == before
    assert manager._last_slot_layout == layout, "vLLM sees that its own differs, and derives them"
