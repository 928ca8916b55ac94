"""The shadow of a LoRA adapter, on CPU and CUDA: the base does not change, a swap exchanges two slot numbers.

vLLM keeps the matrices of all adapters in stacks, `[slots, 1, rank, in]` and `[slots, 1, out, rank]` per layer, and a
list of the adapter id in each slot. Before each step it looks the ids of the batch up in that list and writes slot
numbers into buffers of fixed addresses, which is all that kernels and captured CUDA graphs read. So an adapter gets two
slots under two ids, of which requests use the first; a version is written into the slot of the second, and a swap
exchanges the two entries of the list, and on CUDA the numbers in those buffers too (slot_numbers.py). No weight moves,
nothing is captured again. (A `Slot` of a manifest is something else: a matrix's place in the send buffer.)

Which bytes go where is traced from vLLM's own `set_lora`, run on shapes only (loader_trace.py): packed projections,
tensor-parallel slices and ranks below the slots' own are laid out as in vLLM.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import Any

import torch

from inflight.generator.shadow.loader_trace import LoaderTrace, storage_of
from inflight.generator.shadow.slot_numbers import SlotNumbers
from inflight.messages import Manifest, Slot
from inflight.weights.receive.shadow import ManifestMismatch, TornWeights
from inflight.weights.source import WIRE_DTYPES

SECOND = 1 << 19
"""Added to an adapter's id: the id of its second slot. No request uses it."""
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")
BASE = SECOND - 1 + (1 << 20)
"""The id under which the last slot is held at zero, where kernels take rows of the base, of slot -1, for rows of the
last one: vLLM's on CPU do, in a batch with rows of adapters."""
_TRACED = 1 << 30
"""The id of an adapter that is never registered."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Places in a slot, and the views of the receive buffer whose values they get."""


class AdapterUnfit(ManifestMismatch):
    """An adapter that the engine's slots can't hold; the text names the matrix."""


class SlotShadow:
    """The Shadow of one adapter: `begin`, `build`, `discard` in one thread, `swap` in the step loop's."""

    def __init__(self, manager: Any, adapter: int, device: torch.device, base: str | None = None) -> None:
        """Takes two slots of vLLM's adapter `manager` for good, both zero: the adapter then changes nothing.

        To be called when warm-up is over, which clears all slots. `adapter` is the id that requests name, `base` the
        digest of the engine's weights; None: it is not compared, another rank does that. Raises ValueError when no two
        slots are free.
        """
        self._manager = manager
        self._device = device
        self.base = base
        self._ids = (adapter, adapter + SECOND)
        for each in self._ids:
            hold(manager, each, _free_slot(manager))
        self._stacks = {
            storage_of(stack): (kind, stack)
            for module in manager.modules.values()
            for kind, stacks in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked))
            for stack in stacks
        }
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._swapped = torch.cuda.Event(blocking=True) if self._cuda else None
        """Recorded after the last step that read the slot to be written."""
        self._numbers = SlotNumbers(manager, self.slots, device) if self._cuda else None
        self._manifest: Manifest | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._copies: dict[int, Copies] = {}
        """Slot → copies for the current manifest."""
        self._written: dict[int, Manifest] = {}
        """Slot → the manifest of its content; another manifest may leave other matrices zero."""
        self._built = False

    @property
    def slots(self) -> tuple[int, int]:
        """The slot that computes and the one to be written. Raises TornWeights when vLLM has given one away."""
        table = self._manager.lora_index_to_id
        try:
            return table.index(self._ids[0]), table.index(self._ids[1])
        except ValueError:
            raise TornWeights(f"adapter {self._ids[0]} has lost a slot: {table} is what they hold") from None

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The receive buffer, uint8 `[manifest.total_bytes]`, kept from version to version. Raises AdapterUnfit."""
        self.discard()
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # this thread's: waiting for the default one would wait for the steps
        if manifest != self._manifest:
            self._require_base(manifest.base)
            buffer = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=self._device)
            copies = {slot: self._plan(manifest, buffer, slot) for slot in self.slots}
            self._manifest = manifest
            self._buffer = buffer
            self._copies = copies
        return self._buffer

    def _require_base(self, trained_on: str | None) -> None:
        if trained_on is None or self.base is None or self.base == trained_on:
            return
        held = self.base[:12] or "weights that were not read from files"
        raise AdapterUnfit(
            f"the adapter was trained on another base, {trained_on[:12]}, than this generator has: {held}"
        )

    def build(self) -> None:
        """Copies the received bytes into the slot that does not compute; returns when the copies are done."""
        assert self._manifest is not None
        _, slot = self.slots
        if self._stream is None:
            self._write(slot)
        else:
            from inflight.weights.transport import cuda

            assert self._swapped is not None
            self._swapped.synchronize()
            self._write(slot)
            cuda.wait(self._stream)
        self._built = True

    def swap(self) -> float:
        """Exchanges the slots. On CPU vLLM notices that its table differs, and looks the batch's ids up again at the
        next step.

        Raises RuntimeError when nothing is built.
        """
        if not self._built:
            raise RuntimeError("swap without build")
        started = time.perf_counter()
        table = self._manager.lora_index_to_id
        live, shadow = self.slots
        before = tuple(table)
        table[live], table[shadow] = table[shadow], table[live]
        if self._numbers is not None:
            self._numbers.exchange(before)
        if self._swapped is not None:
            self._swapped.record(torch.cuda.current_stream(self._device))
        self._built = False
        return time.perf_counter() - started

    def discard(self) -> None:
        """Discards a version that was built and not swapped: every version writes all of its slot."""
        self._built = False

    @torch.inference_mode()
    def _write(self, slot: int) -> None:
        assert self._manifest is not None
        if self._written.get(slot) != self._manifest:
            for module in self._manager.modules.values():
                module.reset_lora(slot)
        targets, sources = self._copies[slot]
        torch._foreach_copy_(targets, sources)  # one call, during which other threads run
        self._written[slot] = self._manifest

    def _plan(self, manifest: Manifest, buffer: torch.Tensor, slot: int) -> Copies:
        rank = _rank_of(manifest)
        notes = _SlotTrace(manifest.slots, self._stacks, buffer)
        try:
            with torch.inference_mode(), notes:
                _load(self._manager, dict(notes.checkpoint()), rank, slot)
        except ManifestMismatch:
            raise
        except Exception as error:
            raise AdapterUnfit.by_loader("the adapter", error) from error
        if unread := [each.meta.name for each in manifest.slots if each.meta.name not in notes.read]:
            raise AdapterUnfit(f"the engine has no place for {', '.join(unread[:5])}")
        return notes.targets, notes.sources


def hold(manager: Any, adapter: int, slot: int) -> None:
    """Keeps an adapter of zeros in a slot permanently: it is never evicted."""
    from vllm.lora.lora_model import LoRAModel

    manager._registered_adapters[adapter] = LoRAModel(adapter, manager.lora_config.max_lora_rank, {})
    manager._active_adapters[adapter] = None
    manager.lora_index_to_id[slot] = adapter
    for module in manager.modules.values():
        module.reset_lora(slot)
    manager.pin_adapter(adapter)


def _free_slot(manager: Any) -> int:
    try:
        return int(manager.lora_index_to_id.index(None))
    except ValueError:
        raise ValueError(f"no slot is free for an adapter: {manager.lora_index_to_id} hold them") from None


def _load(manager: Any, tensors: dict[str, torch.Tensor], rank: int, slot: int) -> None:
    """Puts an adapter's tensors into a slot as vLLM does; B is scaled already, so alpha is the rank."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    mapper = names_of_adapters(getattr(manager.model, "hf_to_vllm_mapper", None))
    helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
    adapter = LoRAModel.from_lora_tensors(_TRACED, tensors, helper, device="meta", weights_mapper=mapper)
    manager._create_merged_loras_inplace(adapter)
    for name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(adapter, name)
        if weights is not None:
            module.set_lora(slot, weights.lora_a, weights.lora_b)


def names_of_adapters(mapper: Any) -> Any:
    """The part of a model's WeightsMapper that renames modules. Without the part that stacks them: an adapter's q, k
    and v stay apart until vLLM has packed them. None stays None.

    Raises AdapterUnfit for a mapper of a vLLM that has neither of the known methods.
    """
    if mapper is None:
        return None
    for method in ("get_rename_mapper", "get_unstacked_mapper"):  # since 0.32; in 0.26
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    raise AdapterUnfit(f"this vLLM maps names by {type(mapper).__name__}, which can't be asked for renamings alone")


def _rank_of(manifest: Manifest) -> int:
    """The largest rank of an adapter's pairs. Raises AdapterUnfit for what is no pair of LoRA matrices."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for slot in manifest.slots:
        name = slot.meta.name
        shape = slot.meta.shape
        if (found := _NAME.fullmatch(name)) is None or len(shape) != 2:
            raise AdapterUnfit(f"{name} {list(shape)} is no matrix of a LoRA adapter, which the engine waits for")
        pairs[found[1]][found[2]] = shape
    for name, pair in pairs.items():
        if pair.keys() != {"A", "B"} or pair["A"][0] != pair["B"][1]:
            raise AdapterUnfit(f"{name} has no lora_A and lora_B of one rank: {pair}")
    return max(pair["A"][0] for pair in pairs.values())


class _SlotTrace(LoaderTrace):
    """Which part of a stack would get which part of the receive buffer."""

    def __init__(self, slots: list[Slot], stacks: dict[int, tuple[str, torch.Tensor]], buffer: torch.Tensor) -> None:
        super().__init__(slots)
        self._stacks = stacks
        self._buffer = buffer
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self.read: set[str] = set()

    def is_target(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._stacks

    def filled(self, target: torch.Tensor) -> None:
        """The zeros with which `set_lora` begins: every version writes the same places, so zeros stay zeros."""

    def changed(self, func: Any) -> None:
        raise AdapterUnfit(f"the engine changes its slots by {func}, which can't be planned")

    def copied(self, target: torch.Tensor, source: torch.Tensor, slot: Slot | None) -> None:
        if slot is None:
            if source.numel() == 1 and not source.is_meta:
                return  # `stack[slot] = 0`, as some versions of torch have it
            raise AdapterUnfit("the engine computes an adapter's matrices instead of copying them")
        name = slot.meta.name
        kind, stack = self._stacks[storage_of(target)]
        fills = target.shape[1] == stack.shape[3] if kind == "A" else target.shape[0] == stack.shape[2]
        if source.shape != target.shape or not fills:
            given = list(slot.meta.shape)
            held = list(stack.shape)
            raise AdapterUnfit(f"{name} {given} is not of the engine's shape, which has slots of {held}")
        if source.dtype != target.dtype:
            raise AdapterUnfit(f"{name} is {source.dtype}, the engine's slots are {target.dtype}")
        whole = self._buffer[slot.offset : slot.offset + slot.meta.nbytes].view(WIRE_DTYPES[slot.meta.dtype])
        start = whole.storage_offset() + source.storage_offset()
        self.sources.append(whole.as_strided(source.shape, source.stride(), start))
        self.targets.append(target)
        self.read.add(name)
