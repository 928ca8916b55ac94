"""A model's parameters in one flat range, and nothing of the model left where they were loaded."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from inflight.generator.shadow.cuda_plan import PlanError
from inflight.generator.shadow.layout import lay_out, move_into


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


def moved(model: torch.nn.Module) -> torch.Tensor:
    """The range that the model's parameters lie in now."""
    layout = lay_out(model)
    live = torch.zeros(layout.nbytes, dtype=torch.uint8)
    move_into(layout, live)
    return live


def test_garbage_of_the_loading_keeps_no_memory() -> None:
    model = torch.nn.Linear(3, 2).requires_grad_(False)
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [model.weight.data]
        cycle.append(cycle)
        del cycle
        assert moved(model).data_ptr() == model.weight.data_ptr()
    finally:
        gc.enable()


def test_memory_that_the_model_keeps_elsewhere_too_is_refused() -> None:
    def made() -> torch.nn.Sequential:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).requires_grad_(False)
        model[1].tied = model[0].weight
        model[1].twin = torch.nn.Parameter(model[0].weight.data, requires_grad=False)
        return model

    model = made()
    live = moved(model)
    assert model[1].tied.data_ptr() == model[1].twin.data_ptr() == model[0].weight.data_ptr() == live.data_ptr()
    model = made()
    # As the Mamba-2 mixer does with its convolution.
    model[1].register_buffer("view", model[1].weight.view(4), persistent=False)
    with pytest.raises(PlanError, match=r"references 1\.weight elsewhere too"):
        moved(model)
