"""The features of vLLM that can't be combined with a swap of weights, and why: one table, for CPU and CUDA.

All of them are refused before an engine starts. Those that follow from one setting alone are refused by the launcher
already, without importing vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.config import SWAPS, ConfigError
from inflight.generator.settings import Settings

BOTH = tuple(SWAPS)
DUAL_STREAM = "VLLM_LORA_ENABLE_DUAL_STREAM"
_NO_COMPILATION = 0
"""vLLM's CompilationMode.NONE, an IntEnum."""


class UnsupportedModel(ConfigError):
    """An engine whose weights can't be swapped; the text says why, in one line."""


@dataclass(frozen=True)
class Limit:
    """One row of the table."""

    what: str
    why: str
    found: Callable[[Any], object]
    """Whether a VllmConfig uses the feature; truthy for yes."""
    devices: tuple[str, ...] = BOTH
    arguments: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)
    """Engine arguments that enable the feature: name → predicate on the value, truthy for yes."""


def _more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _is_ray(backend: object) -> bool:
    """Whether it names one of vLLM's Ray executors, or is a class of that kind."""
    return backend == "ray" or getattr(backend, "uses_ray", False) is True


def _has_fixed_scales(dtype: object) -> bool:
    """Whether a KV cache's dtype has fixed scales. The `per_token` dtypes compute a scale with each token instead."""
    return str(dtype).startswith(("fp8", "nvfp4")) and "per_token" not in str(dtype)


def _offloads_weights(config: Any) -> bool:
    offload = getattr(config, "offload_config", None)
    uva = getattr(offload, "uva", None)
    prefetch = getattr(offload, "prefetch", None)
    return bool(getattr(uva, "cpu_offload_gb", 0) or getattr(prefetch, "offload_group_size", 0))


LIMITS = (
    Limit(
        "quantised weights",
        "what the kernels use is computed from the weights when they are loaded",
        lambda config: config.model_config.quantization is not None or getattr(config, "quant_config", None),
        arguments={"quantization": bool},
    ),
    Limit(
        "mixture of experts",
        "experts are fused into tensors that no plan covers",
        lambda config: config.model_config.is_moe,
    ),
    Limit(
        "expert parallelism",
        "experts are fused into tensors that no plan covers",
        lambda config: config.parallel_config.enable_expert_parallel,
        arguments={"enable_expert_parallel": bool},
    ),
    Limit(
        "multi-head latent attention",
        "weights that are derived from the checkpoint's are kept beside them",
        lambda config: config.model_config.use_mla,
    ),
    Limit(
        "LoRA",
        "adapters belong to the weights that they were trained with; trainer.lora trains one, whose base stays",
        lambda config: config.lora_config is not None and not Settings.of(config).adapters,
        arguments={"enable_lora": bool},
    ),
    Limit(
        "fully sharded adapters",
        "not tried",
        lambda config: getattr(config.lora_config, "fully_sharded_loras", False),
        arguments={"fully_sharded_loras": bool},
    ),
    Limit(
        "adapters on a stream of their own (VLLM_LORA_ENABLE_DUAL_STREAM)",
        "a slot would be written while that stream still reads it",
        lambda config: config.lora_config is not None and os.environ.get(DUAL_STREAM, "0") not in ("", "0"),
    ),
    Limit(
        "adapters with pipeline parallelism",
        "a stage has a place for a part of the adapter only",
        lambda config: config.lora_config is not None and _more_than_one(config.parallel_config.pipeline_parallel_size),
    ),
    Limit(
        "speculative decoding",
        "the draft model's weights would stay as they are",
        lambda config: config.speculative_config is not None,
        arguments={"speculative_config": bool},
    ),
    Limit(
        "sleep mode",
        "it moves weights away and back, and knows of one set only",
        lambda config: config.model_config.enable_sleep_mode,
        arguments={"enable_sleep_mode": bool},
    ),
    Limit(
        "weights offloaded to the CPU",
        "there is no second set of them",
        _offloads_weights,
        arguments={"cpu_offload_gb": bool, "offload_group_size": bool},
    ),
    Limit(
        "multimodal models",
        "embeddings of images seen before a swap are kept by content, not by version",
        lambda config: getattr(config.model_config, "is_multimodal_model", False),
    ),
    Limit(
        "prompts given as embeddings",
        "a step embeds its tokens before it carries out a swap by remap, so with the version before",
        lambda config: config.model_config.enable_prompt_embeds,
        arguments={"enable_prompt_embeds": bool},
    ),
    Limit(
        "KV caches outside the engine",
        "what they hold outlives a swap and is found by its tokens alone, whatever weights computed it",
        lambda config: config.kv_transfer_config is not None or getattr(config.cache_config, "kv_offloading_size", 0),
        arguments={"kv_transfer_config": bool, "kv_offloading_size": bool},
    ),
    Limit(
        "encoder caches outside the engine",
        "what they hold outlives a swap and is found by its content alone, whatever weights computed it",
        lambda config: getattr(config, "ec_transfer_config", None),
        arguments={"ec_transfer_config": bool},
    ),
    Limit(
        "KV caches quantised with fixed scales",
        "scales that fit the weights at the start need not fit later ones; bfloat16 and *_per_token_head dtypes do",
        lambda config: _has_fixed_scales(config.cache_config.cache_dtype),
        arguments={"kv_cache_dtype": _has_fixed_scales, "calculate_kv_scales": bool},
    ),
    Limit(
        "data parallelism",
        "only one of its engine cores would get the commit; generator.count gives more generators",
        lambda config: _more_than_one(config.parallel_config.data_parallel_size),
        arguments={"data_parallel_size": _more_than_one},
    ),
    Limit(
        "vLLM's Ray executors",
        "ranks on other nodes have neither keys nor an address of the run; hosts.starter=ray places whole generators",
        lambda config: _is_ray(config.parallel_config.distributed_executor_backend),
        arguments={"distributed_executor_backend": _is_ray},
    ),
    Limit(
        "an engine over several nodes (nnodes)",
        "ranks on other nodes have neither keys nor an address of the run; generator.count gives more generators",
        lambda config: _more_than_one(config.parallel_config.nnodes),
        arguments={"nnodes": _more_than_one},
    ),
    Limit(
        "pipeline parallelism",
        "rebinding takes a model whole",
        lambda config: _more_than_one(config.parallel_config.pipeline_parallel_size),
        devices=("CPU",),
    ),
    Limit(
        "torch.compile",
        "compiled code may hold copies of weights; set enforce_eager",
        lambda config: config.compilation_config.mode != _NO_COMPILATION,
        devices=("CPU",),
    ),
)


def refuse(vllm_config: Any, device: str) -> None:
    """Raises UnsupportedModel with one line for the first feature that this engine uses and `device` (CPU or CUDA) does
    not support, or for a way to swap that the device does not have."""
    for limit in LIMITS:
        if device in limit.devices and limit.found(vllm_config):
            raise UnsupportedModel(f"swapping weights on {device} does not support {limit.what}: {limit.why}")
    swaps = ("auto", *SWAPS[device])
    if (swap := Settings.of(vllm_config).swap) not in swaps:
        raise UnsupportedModel(f"generator.swap={swap} is not for {device}: {', '.join(swaps)} are")


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel with one line for a key of `generator.extra` that enables what no device supports."""
    for limit in LIMITS:
        for name, brings in limit.arguments.items():
            if limit.devices == BOTH and name in arguments and brings(arguments[name]):
                asked = f"generator.extra.{name}={arguments[name]!r}"
                raise UnsupportedModel(f"{asked} is not allowed: swaps do not support {limit.what}: {limit.why}")
