"""The state of all random number generators as tensors: Python's, numpy's, torch's on CPU and on each device."""

from __future__ import annotations

import random

import numpy as np
import torch


def capture() -> dict[str, torch.Tensor]:
    """The current state."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        state[f"cuda.{device}"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, torch.Tensor]) -> None:
    """Restores the state; devices that this machine does not have are skipped."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = float(state["numpy_gauss"].item())
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for device in range(torch.cuda.device_count()):
        if f"cuda.{device}" in state:
            torch.cuda.set_rng_state(state[f"cuda.{device}"], device)
