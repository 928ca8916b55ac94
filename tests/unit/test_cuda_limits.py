"""What can't be updated on CUDA is refused by name, and the hook runs right before each forward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inflight.generator.shadow.limits import refuse_unsupported
from inflight.generator.worker.step_hooks import hook_forward, hook_logits


def engine(**changes: Any) -> SimpleNamespace:
    model = {
        "quantization": None, "is_moe": False, "use_mla": False, "enable_sleep_mode": False,
        "is_multimodal_model": False,
    }  # fmt: skip
    config = {"lora_config": None, "speculative_config": None}
    parallel = {"enable_expert_parallel": False}
    offload = {"cpu_offload_gb": 0}
    prefetch = {"offload_group_size": 0}
    for group in (model, config, parallel, offload, prefetch):
        group.update({key: value for key, value in changes.items() if key in group})
    return SimpleNamespace(
        **config,
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        offload_config=SimpleNamespace(uva=SimpleNamespace(**offload), prefetch=SimpleNamespace(**prefetch)),
    )


def test_a_dense_model_is_taken() -> None:
    refuse_unsupported(engine())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quantization": "fp8"}, r"quantised weights \(fp8\)"),
        ({"is_moe": True}, "mixture-of-experts"),
        ({"use_mla": True}, "latent attention"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"enable_expert_parallel": True}, "expert parallelism"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"cpu_offload_gb": 4}, "offloaded"),
        ({"offload_group_size": 8}, "offloaded"),
        ({"is_multimodal_model": True}, "multimodal"),
    ],
)
def test_what_would_be_left_half_updated_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        refuse_unsupported(engine(**change))


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
