"""Finds NaN and Inf in a version, which then never goes live."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch


class NotFinite(ValueError):
    """A packed version that must not go live; the text names the parameters."""


@torch.no_grad()
def require_finite(version: int, views: Mapping[str, torch.Tensor]) -> None:
    """Raises NotFinite when a parameter in the send buffer holds NaN or Inf; `views` are its parameters by name.

    One pass: a sum of magnitudes in float32 is finite only if its terms are. A sum may overflow though all terms are
    finite, so a suspect parameter is checked again, element by element. On CUDA a few kernels sum all parameters, on a
    stream of their own, so that they do not wait for the training step in progress.
    """
    with _own_stream(next(iter(views.values())).device):
        sums: dict[str, torch.Tensor] = {}
        for dtype in {view.dtype for view in views.values()}:
            names = [name for name, view in views.items() if view.dtype is dtype]
            norms = torch._foreach_norm([views[name] for name in names], 1.0, torch.float32)
            sums.update(zip(names, norms, strict=True))
        finite = torch.isfinite(torch.stack(list(sums.values()))).tolist()
        suspects = [name for name, ok in zip(sums, finite, strict=True) if not ok]
        bad = [name for name in suspects if not torch.isfinite(views[name]).all().item()]
        if bad:
            view = views[bad[0]]
            count = int((~torch.isfinite(view)).sum().item())
            kind = str(view.dtype).removeprefix("torch.")
            more = f", and {len(bad) - 1} more parameters" if len(bad) > 1 else ""
            what = f"{bad[0]} holds NaN or Inf ({count} of {view.numel()} values, in {kind}){more}"
            raise NotFinite(f"version {version} is rejected: {what}")


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
