"""What the CUDA worker must know of vLLM: which engines it can't update yet, and where a step uses its weights."""

from __future__ import annotations

from typing import Any


def hook_forward(runner: Any, before: Any) -> bool:
    """Has `before()` called right before each forward pass is launched. False when this runner has no such place.

    The V2 runner calls `kv_connector.pre_forward` there in every mode (full graph, piecewise, eager); the V1 runner
    calls `_model_forward`.
    """
    if hasattr(runner, "kv_connector") and hasattr(runner.kv_connector, "pre_forward"):
        runner.kv_connector = _BeforeForward(runner.kv_connector, before)
        return True
    if hasattr(runner, "_model_forward"):
        forward = runner._model_forward

        def hooked(*args: Any, **kwargs: Any) -> Any:
            before()
            return forward(*args, **kwargs)

        runner._model_forward = hooked
        return True
    return False


def hook_logits(model: Any, after: Any) -> None:
    """Has `after()` called when a step's logits are queued: both runners call `model.compute_logits`, and nothing that
    follows in a step (sampling, copies, the next step's inputs) reads weights. Without it no step ends early."""
    compute = getattr(model, "compute_logits", None)
    if compute is None:
        return

    def hooked(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        after()
        return logits

    model.compute_logits = hooked


class _BeforeForward:
    """A KV connector as it is, with a call before `pre_forward`."""

    def __init__(self, connector: Any, before: Any) -> None:
        self._connector = connector
        self._before = before

    def pre_forward(self, scheduler_output: Any) -> None:
        self._before()
        self._connector.pre_forward(scheduler_output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)


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
