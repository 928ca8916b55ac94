"""From a run's configuration to vLLM's own arguments and environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from inflight.config import ConfigError, RunConfig
from inflight.config.network import LOOPBACK
from inflight.generator.server_args import fields_of, nearest, server_values
from inflight.generator.settings import NO_VERSION, Settings
from inflight.generator.shadow.limits import refuse_arguments
from inflight.listening import nccl_settings
from inflight.models import prepare

CPU_WORKER = "inflight.generator.worker.cpu.InflightCPUWorker"
CUDA_WORKER = "inflight.generator.worker.cuda.InflightCUDAWorker"
CPU_ADAPTER_WORKER = "inflight.generator.worker.adapter_cpu.InflightCPUAdapterWorker"
CUDA_ADAPTER_WORKER = "inflight.generator.worker.adapter_cuda.InflightCUDAAdapterWorker"
ON_CPU = (CPU_WORKER, CPU_ADAPTER_WORKER)
ENGINE_ARGS = ("EngineArgs", "AsyncEngineArgs")
PLUGIN = "inflight"
"""The name of plugin.py among vLLM's plugins."""
ON_CUDA: dict[str, Any] = {
    # A worker process even for one device, so that the engine core can output tokens while the worker swaps.
    "distributed_executor_backend": "mp",
    # The size of the KV cache is set explicitly, so this fraction has one effect left: an engine does not start unless
    # that much of the device is free. vLLM's default (nearly all) would refuse a device that the trainer uses as well.
    "gpu_memory_utilization": 0.05,
}
STREAM_INTERVAL = 32
"""Tokens per chunk of a stream. Each chunk costs front-end time; tokens not sent yet are lost if the engine dies."""

OWN = {
    "model": "model.name",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "load_format": "",
    "seed": "seed",
    "tensor_parallel_size": "generator.tensor_parallel_size",
    "max_model_len": "generator.max_model_len",
    "max_num_seqs": "generator.max_num_seqs",
    "kv_cache_memory_bytes": "generator.kv_cache_gib",
    "enable_prefix_caching": "generator.prefix_caching",
    "max_logprobs": "rollout.kept_tokens",
    "logprobs_mode": "",
    "generation_config": "",
    "worker_cls": "",
    "enable_lora": "trainer.lora",
    "max_lora_rank": "trainer.lora.rank",
    "additional_config": "",
}
"""Engine arguments that inflight sets itself, and the option that each follows; empty: inflight needs a fixed value."""


def require_extra(extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key of `generator.extra` that inflight sets itself, that enables a feature swaps do not
    support, or that is no engine argument of the installed vLLM. Parses vLLM's source, because importing vLLM takes
    many seconds."""
    refuse_arguments(extra)
    for name in extra:
        if name in OWN:
            raise ConfigError(f"generator.extra.{name} is not allowed: {OWN[name] or 'inflight'} sets it")
    known = fields_of("vllm.engine.arg_utils", ENGINE_ARGS) if extra else set[str]()
    if unknown := sorted(extra.keys() - known):
        near = nearest(unknown[0], known)
        raise ConfigError(f"generator.extra.{unknown[0]} is not an engine argument of this vLLM{near}")


def environment(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that a generator adds to or changes in `given`. They must be set before vLLM (or torch) is
    imported, because thread pools read them once."""
    plugins = given.get("VLLM_PLUGINS")
    return {
        "OMP_NUM_THREADS": str(config.generator.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default vLLM binds every engine's workers to the same first cores
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",  # a stop must fit into the launcher's grace period
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_SERVER_DEV_MODE": "0",  # dev mode lets any HTTP client call any method of a worker
        **({"VLLM_API_KEY": key} if (key := config.api_key()) else {}),
        **nccl_settings(config.network, given),
        **({"VLLM_PLUGINS": f"{plugins},{PLUGIN}"} if plugins is not None else {}),  # the user's plugins and ours
    }


def adapters_of(config: RunConfig) -> list[str]:
    """Names of the adapters that have versions in this run."""
    return [config.trainer.adapter] if config.trainer.adapter else []


def worker_of(config: RunConfig, *, cpu: bool) -> str:
    """The worker class of a run's generators."""
    if config.trainer.adapter:
        return CPU_ADAPTER_WORKER if cpu else CUDA_ADAPTER_WORKER
    return CPU_WORKER if cpu else CUDA_WORKER


def _engine_seed(config: RunConfig, name: str) -> int:
    """A different one for each generator: where requests have no seeds, two generators with the same seed would draw
    the same samples for a group."""
    return (config.seed + (int(name[1:]) if config.is_generator(name) else 0)) % (1 << 32)


def engine_values(config: RunConfig, name: str, worker: str) -> dict[str, Any]:
    """vLLM's engine arguments for generator `name`; `generator.extra` overrides all but those of OWN."""
    generator = config.generator
    model = str(prepare(config.start_model, revision=config.model.revision))
    settings = Settings(
        endpoint=config.endpoint("weights"),
        generator=name,
        version=NO_VERSION,
        heartbeat_s=config.bus.heartbeat_s,
        dead_after_s=config.bus.dead_after_s,
        keys=config.bus.keys,
        network=config.network,
        share_prefix_across_versions=generator.share_prefix_across_versions,
        swap=generator.swap,
        adapters=adapters_of(config),
    )
    return {
        "enforce_eager": worker in ON_CPU,  # compiled CPU code may hold copies of weights
        **({} if worker in ON_CPU else ON_CUDA),
        **({"max_loras": 1} if config.trainer.adapter else {}),
        "stream_interval": STREAM_INTERVAL,
        **generator.extra,
        "model": model,
        "served_model_name": [config.model.served_name or config.model.name],
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "load_format": "auto",  # not "dummy": random weights are not those of the start version
        "seed": _engine_seed(config, name),
        "tensor_parallel_size": generator.tensor_parallel_size,
        "max_model_len": generator.max_model_len,
        "max_num_seqs": generator.max_num_seqs,
        "kv_cache_memory_bytes": int(generator.kv_cache_gib * (1 << 30)),
        "enable_prefix_caching": generator.prefix_caching,
        "logprobs_mode": "processed_logprobs",  # of the distribution that the token was sampled from
        "max_logprobs": max(20, config.rollout.kept_tokens + 1),  # the most that the actor requests (completions.py)
        "generation_config": "vllm",  # sampling follows the request, not defaults from the checkpoint
        "worker_cls": worker,
        "enable_lora": bool(config.trainer.adapter),
        "max_lora_rank": config.trainer.lora.slot_rank,
        "additional_config": settings.as_additional_config(),
    }


def server_arguments(
    parser: argparse.ArgumentParser, values: dict[str, Any], server: Mapping[str, Any] = MappingProxyType({})
) -> argparse.Namespace:
    """vLLM's server arguments: its defaults, overridden by `values` of the engine and by `server`, the run's own.

    Raises ConfigError for a name that is no argument of this vLLM.
    """
    arguments = parser.parse_args([])
    own = {"host": LOOPBACK, "disable_uvicorn_access_log": True, "uvicorn_log_level": "warning"}
    for name, value in {**values, **server_values(parser, server), **own}.items():
        if not hasattr(arguments, name):
            raise ConfigError(f"generator.extra.{name} is not an argument of this vLLM")
        setattr(arguments, name, value)
    return arguments
