"""What swaps do not support is refused by name: of an engine, and of settings before vLLM is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config import ConfigError
from inflight.generator.engine_args import ENGINE_ARGS, require_extra
from inflight.generator.server_args import fields_of
from inflight.generator.shadow.limits import BOTH, LIMITS, SWAPS, refuse

PARTS: dict[str, dict[str, Any]] = {
    "model_config": {
        "quantization": None,
        "is_moe": False,
        "use_mla": False,
        "enable_sleep_mode": False,
        "enable_prompt_embeds": False,
        "is_multimodal_model": False,
    },
    "parallel_config": {
        "enable_expert_parallel": False,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "nnodes": 1,
    },
    "cache_config": {"cache_dtype": "auto", "kv_offloading_size": None},
    "compilation_config": {"mode": 0},
}
WHOLE = {
    "quant_config": None,
    "lora_config": None,
    "speculative_config": None,
    "kv_transfer_config": None,
    "ec_transfer_config": None,
    "additional_config": None,
}


def engine(**changes: Any) -> SimpleNamespace:
    """What of a VllmConfig is looked at: of a dense model, with `changes`."""
    parts = {name: SimpleNamespace(**{k: changes.get(k, v) for k, v in part.items()}) for name, part in PARTS.items()}
    uva = SimpleNamespace(cpu_offload_gb=changes.get("cpu_offload_gb", 0))
    prefetch = SimpleNamespace(offload_group_size=changes.get("offload_group_size", 0))
    whole = {k: changes.get(k, v) for k, v in WHOLE.items()}
    return SimpleNamespace(**parts, **whole, offload_config=SimpleNamespace(uva=uva, prefetch=prefetch))


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8_per_token_head", "fp8_per_token_head"])
def test_a_dense_model_is_taken(device: str, dtype: str) -> None:
    refuse(engine(cache_dtype=dtype), device)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quantization": "fp8"}, "quantised weights: "),
        ({"quant_config": object()}, "quantised weights: "),
        ({"is_moe": True}, "mixture of experts: "),
        ({"use_mla": True}, "multi-head latent attention: "),
        ({"lora_config": object()}, "LoRA: "),
        ({"speculative_config": object()}, "speculative decoding: "),
        ({"enable_expert_parallel": True}, "expert parallelism: "),
        ({"enable_sleep_mode": True}, "sleep mode: "),
        ({"enable_prompt_embeds": True}, "prompts given as embeddings: "),
        ({"cpu_offload_gb": 4}, "weights offloaded to the CPU: "),
        ({"offload_group_size": 8}, "weights offloaded to the CPU: "),
        ({"is_multimodal_model": True}, "multimodal models: "),
        ({"kv_transfer_config": object()}, "KV caches outside the engine: what they hold outlives a swap"),
        ({"kv_offloading_size": 1.0}, "KV caches outside the engine: "),
        ({"ec_transfer_config": object()}, "encoder caches outside the engine: "),
        ({"cache_dtype": "fp8"}, "KV caches quantised with fixed scales: "),
        ({"cache_dtype": "fp8_e5m2"}, "KV caches quantised with fixed scales: "),
        ({"cache_dtype": "nvfp4"}, "KV caches quantised with fixed scales: "),
        ({"data_parallel_size": 2}, "data parallelism: .* generator.count gives more generators"),
        ({"distributed_executor_backend": "ray"}, "vLLM's Ray executors: ranks on other nodes have neither"),
        ({"distributed_executor_backend": type("Own", (), {"uses_ray": True})}, "vLLM's Ray executors: "),
        ({"nnodes": 2}, r"an engine over several nodes \(nnodes\): .* generator.count gives more generators"),
    ],
)
def test_what_a_swap_would_leave_half_updated_is_refused(device: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^swapping weights on {device} does not support {named}"):
        refuse(engine(**change), device)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"pipeline_parallel_size": 2}, "pipeline parallelism"), ({"mode": 3}, "torch.compile: .*; set enforce_eager")],
)
def test_what_rebinding_alone_cant_do_is_refused_on_cpu(change: dict[str, Any], named: str) -> None:
    refuse(engine(**change), "CUDA")
    with pytest.raises(ConfigError, match=f"on CPU does not support {named}"):
        refuse(engine(**change), "CPU")


@pytest.mark.parametrize(("device", "other"), [("CPU", "graphs"), ("CUDA", "rebind")])
def test_another_devices_way_to_swap_is_refused(device: str, other: str) -> None:
    for swap in SWAPS[device]:
        refuse(engine(additional_config={"inflight": {"swap": swap}}), device)
    with pytest.raises(ConfigError, match=f"generator.swap={other} is not for {device}: auto, "):
        refuse(engine(additional_config={"inflight": {"swap": other}}), device)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("kv_transfer_config", {"kv_connector": "ExampleConnector"}, "KV caches outside the engine"),
        ("kv_offloading_size", 1, "KV caches outside the engine"),
        ("ec_transfer_config", {"ec_connector": "ExampleConnector"}, "encoder caches outside the engine"),
        ("kv_cache_dtype", "fp8", "KV caches quantised with fixed scales"),
        ("speculative_config", {"method": "ngram"}, "speculative decoding"),
        ("enable_lora", True, "LoRA"),
        ("enable_prompt_embeds", True, "prompts given as embeddings"),
        ("quantization", "fp8", "quantised weights"),
        ("data_parallel_size", 2, "data parallelism"),
        ("distributed_executor_backend", "ray", "vLLM's Ray executors"),
        ("nnodes", 2, "an engine over several nodes"),
    ],
)
def test_a_setting_that_brings_it_is_refused_by_name_before_anything_starts(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_extra({name: value})
    assert str(refused.value).startswith(
        f"generator.extra.{name}={value!r} is not allowed: swaps do not support {says}"
    )


@pytest.mark.vllm
def test_a_setting_that_brings_nothing_of_it_is_taken() -> None:
    require_extra({"kv_cache_dtype": "auto", "kv_offloading_size": None, "data_parallel_size": 1})
    require_extra({"distributed_executor_backend": "mp", "nnodes": 1})


@pytest.mark.vllm
def test_this_vllm_has_what_the_table_looks_at() -> None:
    from vllm.config import CacheConfig, CompilationMode, ModelConfig, ParallelConfig, VllmConfig

    assert CompilationMode.NONE == 0
    kinds = {"model_config": ModelConfig, "parallel_config": ParallelConfig, "cache_config": CacheConfig}
    for part, kind in kinds.items():
        assert [name for name in PARTS[part] if not hasattr(kind, name) and name not in kind.__dataclass_fields__] == []
    assert WHOLE.keys() <= VllmConfig.__dataclass_fields__.keys()
    settings = {name for limit in LIMITS for name in limit.arguments}
    known = fields_of("vllm.engine.arg_utils", ENGINE_ARGS)
    assert settings - known <= {"calculate_kv_scales"}, "which later versions than 0.26 lack"
