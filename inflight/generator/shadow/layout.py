"""Lays out a model's parameters one after the other in one flat range, and moves them there."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from inflight.generator.shadow.cuda_plan import PlanError, Region

ALIGNMENT = 256
"""Alignment of each parameter's start in the arena, in bytes, as in torch's own allocator."""


@dataclass
class Layout:
    """Where each parameter lies in the arena; tied parameters appear once."""

    regions: list[Region]
    tensors: list[torch.nn.Parameter]
    aliases: list[tuple[torch.nn.Parameter, int]] = field(default_factory=list)
    """Other parameters that share a region's storage, each with the region's number."""

    @property
    def nbytes(self) -> int:
        """Total size in bytes, padding included."""
        return max((region.stop for region in self.regions), default=0)


def lay_out(model: torch.nn.Module) -> Layout:
    """The layout of a loaded model's parameters. Raises PlanError for a parameter that can't lie in an arena."""
    layout = Layout([], [])
    at = 0
    seen: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if parameter.numel() == 0:
            continue
        if not parameter.is_contiguous():
            raise PlanError(f"{name} is not contiguous: this model's weights can't be moved into an arena")
        known = seen.setdefault(parameter.data_ptr(), len(layout.regions))
        if known < len(layout.regions):
            layout.aliases.append((parameter, known))
            continue
        stop = at + parameter.numel() * parameter.element_size()
        layout.regions.append(Region(name, at, stop))
        layout.tensors.append(parameter)
        at = -(-stop // ALIGNMENT) * ALIGNMENT
    return layout


def move_into(layout: Layout, live: torch.Tensor) -> None:
    """Copies every parameter into uint8 `live` and points it there; its old memory is free afterwards.

    Raises PlanError when the model holds another reference to that memory: it would never get another version.
    """
    loaded = [StorageWeakRef(parameter.untyped_storage()) for parameter in layout.tensors]
    views = []
    for region, parameter in zip(layout.regions, layout.tensors, strict=True):
        view = live[region.start : region.stop].view(parameter.dtype).view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
        views.append(view)
    for parameter, number in layout.aliases:
        parameter.data = views[number].view(parameter.shape)
    _check_left(layout, loaded)
    torch.cuda.synchronize(live.device)
    torch.cuda.empty_cache()


def _check_left(layout: Layout, loaded: list[StorageWeakRef]) -> None:
    gc.collect()
    kept = [region.name for region, storage in zip(layout.regions, loaded, strict=True) if not storage.expired()]
    if kept:
        more = f" and of {len(kept) - 1} more" if len(kept) > 1 else ""
        raise PlanError(f"the model references {kept[0]}{more} elsewhere too: a swap would not update that reference")
