"""Which bytes of a version go where in the live weights, traced from vLLM's own loader (loader_trace.py), for which a
version is a checkpoint.

The plan is refused, naming the parameter, when a live byte is neither written from the checkpoint nor filled with a
constant, when one is written twice, or when the loader computes instead of copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.generator.shadow.loader_trace import LoaderTrace, writes
from inflight.messages import Manifest, Slot
from inflight.weights.receive.shadow import ManifestMismatch
from inflight.weights.transport.scatter import CopyRegion

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Span = tuple[int, int]


class PlanError(ManifestMismatch):
    """The engine's weights can't be filled from the payload; the text names the parameter."""


@dataclass(frozen=True)
class Region:
    """One live parameter: its name and its bytes `[start, stop)` in the arena."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """`strips[name]` fills the arena from parameter `name` of the send buffer; `constant` bytes keep their value."""

    strips: dict[str, list[CopyRegion]]
    constant: list[Span]

    @property
    def all_strips(self) -> list[CopyRegion]:
        """Every strip, in the send buffer's order."""
        return sorted((strip for strips in self.strips.values() for strip in strips), key=lambda strip: strip.source)

    @property
    def nbytes(self) -> int:
        """Bytes of one version that this rank receives."""
        return sum(strip.nbytes for strip in self.all_strips)


def make_plan(
    manifest: Manifest,
    load_weights: LoadWeights,
    regions: list[Region],
    base: int,
    device: torch.device,
    *,
    whole: bool = True,
) -> Plan:
    """The plan of one rank. `base` is the live range's address on `device`, `regions` its parameters.

    `whole`: this rank takes some of every parameter, as it does without pipeline parallelism. Raises PlanError.
    """
    notes = _trace(manifest, load_weights, (base, max(region.stop for region in regions) + base), device)
    plan = Plan(notes.strips, notes.constant)
    _check_coverage(plan, regions)
    unused = [slot.meta.name for slot in manifest.slots if slot.meta.name not in plan.strips]
    if whole and unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise PlanError(f"the engine has no parameter for {', '.join(unused[:5])}{more}")
    return plan


def _trace(manifest: Manifest, load_weights: LoadWeights, live: Span, device: torch.device) -> _CopyTrace:
    notes = _CopyTrace(manifest.slots, live, device)
    try:
        with torch.inference_mode(), notes:
            load_weights(notes.checkpoint())
    except PlanError:
        raise
    except Exception as error:
        raise PlanError.by_loader(notes.current, error) from error
    return notes


class _CopyTrace(LoaderTrace):
    """Records which bytes would be copied where in the live range, and which would be filled with a constant."""

    def __init__(self, slots: list[Slot], live: Span, device: torch.device) -> None:
        super().__init__(slots)
        self._live = live
        self._device = device
        self.strips: dict[str, list[CopyRegion]] = {}
        self.constant: list[Span] = []

    @property
    def given(self) -> str:
        """The name of the tensor that the loader was given last."""
        return self.current.meta.name if self.current else ""

    def is_target(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device == self._device and tensor.numel() > 0 and self._live[0] <= tensor.data_ptr() < self._live[1]
        )

    def filled(self, target: torch.Tensor) -> None:
        self.constant += _byte_spans(target, self._live[0])

    def changed(self, func: Any) -> None:
        raise PlanError(f"{self.given}: the loader changes live weights by {func}, which can't be planned")

    def copied(self, target: torch.Tensor, source: torch.Tensor, slot: Slot | None) -> None:
        if slot is None:
            raise PlanError(f"{self.given}: the loader computes the weight instead of copying it")
        name = slot.meta.name
        if source.shape != target.shape or source.dtype != target.dtype:
            raise PlanError(
                f"{name}: the payload has {tuple(source.shape)} {source.dtype}, "
                f"the engine has {tuple(target.shape)} {target.dtype}"
            )
        at = target.data_ptr() - self._live[0]
        source_at = slot.offset + source.storage_offset() * source.element_size()
        self.strips.setdefault(name, []).extend(_strips(name, source, target, source_at, at))


def _strips(name: str, source: torch.Tensor, target: torch.Tensor, source_at: int, target_at: int) -> list[CopyRegion]:
    """The fewest two-dimensional copies, in bytes, between tensors of equal shape and any strides."""
    item = source.element_size()
    dims = _merged(source.shape, source.stride(), target.stride())
    size, source_step, target_step = dims.pop() if dims else (1, 1, 1)
    if source_step != 1 or target_step != 1:
        raise PlanError(f"{name}: the loader transposes it, which can't be planned")
    width = size * item
    rows, source_pitch, target_pitch = dims.pop() if dims else (1, 0, 0)
    one = CopyRegion(source_at, target_at, width, rows, source_pitch * item, target_pitch * item)
    strips = [one]
    for count, source_step, target_step in reversed(dims):
        strips = [
            CopyRegion(
                strip.source + i * source_step * item,
                strip.target + i * target_step * item,
                strip.width,
                strip.rows,
                strip.source_pitch,
                strip.target_pitch,
            )
            for i in range(count)
            for strip in strips
        ]
    return strips


def _merged(shape: Iterable[int], source: Iterable[int], target: Iterable[int]) -> list[tuple[int, int, int]]:
    """(extent, source stride, target stride) of each dimension; dimensions contiguous in both are merged."""
    dims: list[tuple[int, int, int]] = []
    for extent, step, target_step in zip(shape, source, target, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == step * extent and dims[-1][2] == target_step * extent:
            dims[-1] = (dims[-1][0] * extent, step, target_step)
        else:
            dims.append((extent, step, target_step))
    return dims


def _byte_spans(tensor: torch.Tensor, base: int) -> list[Span]:
    item = tensor.element_size()
    dims = _merged(tensor.shape, tensor.stride(), tensor.stride())
    start = tensor.data_ptr() - base
    if tensor.numel() == 0:
        return []
    size, step, _ = dims.pop() if dims else (1, 1, 1)
    starts = [start]
    for extent, stride, _ in dims:
        starts = [at + i * stride * item for at in starts for i in range(extent)]
    if step != 1:
        return [(at + i * step * item, at + (i * step + 1) * item) for at in starts for i in range(size)]
    return [(at, at + size * item) for at in starts]


def _target_spans(strip: CopyRegion) -> list[Span]:
    if strip.rows == 1 or strip.target_pitch == strip.width:
        return [(strip.target, strip.target + strip.nbytes)]
    return [
        (strip.target + row * strip.target_pitch, strip.target + row * strip.target_pitch + strip.width)
        for row in range(strip.rows)
    ]


def _check_coverage(plan: Plan, regions: list[Region]) -> None:
    written = sorted((*span, name) for name, strips in plan.strips.items() for s in strips for span in _target_spans(s))
    for (_, stop, name), (start, _, other) in pairwise(written):
        if start < stop:
            raise PlanError(f"{name} and {other} are loaded into the same weights")
    covered = _union([(start, stop) for start, stop, _ in written] + plan.constant)
    missing = [region.name for region in regions if not any(a <= region.start and region.stop <= b for a, b in covered)]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise PlanError(f"the payload does not fill all of {', '.join(missing[:5])}{more}")


def _union(spans: list[Span]) -> list[Span]:
    union: list[Span] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


@contextmanager
def redirected(live: torch.Tensor, shadow: torch.Tensor) -> Iterator[None]:
    """While it is open, this thread's writes to the live range go to the same place in `shadow` instead.

    Both are uint8 and of the same length. Lets vLLM's own loader fill a shadow beside a running engine.
    """
    with torch.inference_mode(), _Redirect(live, shadow):
        yield


class _Redirect(TorchDispatchMode):
    def __init__(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        super().__init__()
        self._start = live.data_ptr()
        self._stop = live.data_ptr() + live.numel()
        self._shadow = shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [i for i, argument in enumerate(func._schema.arguments[: len(args)]) if writes(argument)]
        moved = list(args)
        hits = [
            i for i in written if isinstance(args[i], torch.Tensor) and self._start <= args[i].data_ptr() < self._stop
        ]
        for i in hits:
            moved[i] = self._twin(args[i])
        result = func(*moved, **kwargs)
        return args[hits[0]] if hits else result  # an in-place operation returns what it was called on

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.data_ptr() - self._start
        item = tensor.element_size()
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        flat = self._shadow[at : at + extent * item].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())
