"""Which engines the CUDA worker can't update yet."""

from __future__ import annotations

from typing import Any


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises ValueError with one line for what a swap would leave half updated."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    offload = getattr(vllm_config, "offload_config", None)
    uva, prefetch = getattr(offload, "uva", None), getattr(offload, "prefetch", None)
    reasons = {
        f"quantised weights ({model.quantization})": model.quantization is not None,
        "mixture-of-experts models": bool(model.is_moe),
        "multi-head latent attention": bool(model.use_mla),
        "LoRA": vllm_config.lora_config is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "expert parallelism": bool(parallel.enable_expert_parallel),
        "sleep mode": bool(model.enable_sleep_mode),
        "weights offloaded to the CPU": bool(
            getattr(uva, "cpu_offload_gb", 0) or getattr(prefetch, "offload_group_size", 0)
        ),
        "multimodal models": bool(getattr(model, "is_multimodal_model", False)),
    }
    found = [reason for reason, there in reasons.items() if there]
    if found:
        raise ValueError(f"inflight can't update {', '.join(found)} on CUDA yet")
