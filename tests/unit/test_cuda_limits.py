"""The hook runs right before each forward pass, whatever the runner is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inflight.generator.shadow.step_hooks import hook_forward, hook_logits


def test_hook_runs_before_the_connector_and_keeps_the_rest() -> None:
    calls: list[str] = []
    connector = SimpleNamespace(
        pre_forward=lambda output: calls.append(f"forward {output}"), no_forward=lambda: "nothing", set_disabled=len
    )
    runner = SimpleNamespace(kv_connector=connector)
    assert hook_forward(runner, lambda: calls.append("swap"))
    runner.kv_connector.pre_forward("step")
    assert calls == ["swap", "forward step"]
    assert runner.kv_connector.no_forward() == "nothing"


def test_hook_passes_on_whatever_vllm_gives_the_connector() -> None:
    """From 0.32 on vLLM hands over the batch and the attention metadata too."""
    seen: list[Any] = []
    connector = SimpleNamespace(pre_forward=lambda *args, **kwargs: seen.append((args, kwargs)))
    runner = SimpleNamespace(kv_connector=connector)
    assert hook_forward(runner, lambda: seen.append("swap"))
    runner.kv_connector.pre_forward("step", "batch", attn_metadata="metadata")
    assert seen == ["swap", (("step", "batch"), {"attn_metadata": "metadata"})]


def test_hook_on_the_older_runner() -> None:
    calls: list[str] = []
    runner = SimpleNamespace(_model_forward=lambda step: calls.append(f"forward {step}") or "hidden")
    assert hook_forward(runner, lambda: calls.append("swap"))
    assert runner._model_forward("step") == "hidden"
    assert calls == ["swap", "forward step"]


def test_a_runner_without_a_place_for_it_swaps_at_the_commit() -> None:
    assert not hook_forward(SimpleNamespace(), lambda: None)


def test_hook_after_the_logits() -> None:
    calls: list[str] = []
    model = SimpleNamespace(compute_logits=lambda hidden: calls.append(f"logits of {hidden}") or "logits")
    hook_logits(model, lambda: calls.append("used"))
    assert model.compute_logits("hidden") == "logits"
    assert calls == ["logits of hidden", "used"]
    hook_logits(SimpleNamespace(), lambda: None)  # a model that has none
