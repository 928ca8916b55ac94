"""The functions of vLLM that inflight replaces, overrides or calls although they are not a public interface, and the
attributes of its objects that it reads or sets.

Each function is listed with every signature that a supported vLLM version has. `require` compares them with the sources
of the installed vLLM before an engine starts, so that what changed is refused by name instead of raising a TypeError or
an AttributeError in the middle of a step. The check also runs on an unpacked wheel (`make verify-patches`).
docs/patches.md describes how to add a version.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

from inflight.generator.declared import Attributes, Hook, Sources

Side = Literal["cuda", "cpu", "server", "adapters"]
"""The part that uses a hook: the CUDA worker, the CPU worker (and the audit's engine), the HTTP server's process, or
the workers of engines whose LoRA adapters have versions."""


class HookChanged(RuntimeError):
    """The installed vLLM changed a function or a class that inflight depends on."""


_RUNNERS = ("v1/worker/gpu/model_runner.py", "v1/worker/gpu_model_runner.py")
_FORWARD = "self, input_ids=None, positions=None, intermediate_tensors=None, inputs_embeds=None, **model_kwargs"
_ENGINE = (
    "cls, vllm_config, start_engine_loop=True, usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=None, "
    "enable_log_requests=False, aggregate_engine_logging=False, disable_log_stats=False, client_addresses=None, "
    "client_count=1, client_index=0"
)
_PLAIN = ("self",)
_GRAPHS = "compilation/cuda_graph.py"
_NUMBERS = ("self, token_lora_mapping",)
_BASE_NUMBERS = ("self, mapping, lora_index_to_id, max_loras, vocab_size",)
_CORE = ("v1/engine/core.py",)
_MANAGER = ("lora/model_manager.py",)
_LINEAR = ("lora/layers/base_linear.py", "lora/layers/column_parallel_linear.py")
_START = ("self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False",)
_WORKERS = (("Worker", "v1/worker/gpu_worker.py"), ("CPUWorker", "v1/worker/cpu_worker.py"))

HOOKS: dict[Side, tuple[Hook | Attributes, ...]] = {
    "cuda": (
        Hook("Worker.load_model", ("v1/worker/gpu_worker.py",), ("self, *, load_dummy_weights=False",)),
        Hook("Worker.determine_available_memory", ("v1/worker/gpu_worker.py",), _PLAIN),
        Hook("Worker.compile_or_warm_up_model", ("v1/worker/gpu_worker.py",), _PLAIN),
        Hook("Worker.get_kv_cache_spec", ("v1/worker/gpu_worker.py",), _PLAIN),
        Hook("Worker.shutdown", ("v1/worker/gpu_worker.py",), _PLAIN),
        Hook("GPUModelRunner.get_model", _RUNNERS, _PLAIN),
        Hook("GPUModelRunner.profile_cudagraph_memory", _RUNNERS, _PLAIN),
        Hook("GPUModelRunner.capture_model", _RUNNERS, ("self", "self, *, profile_only=False")),
        Hook("GPUModelRunner._model_forward", ("v1/worker/gpu_model_runner.py",), (_FORWARD,)),
        Attributes("GPUModelRunner", _RUNNERS, ("model_memory_usage", "parallel_config")),
        Attributes("GPUModelRunner", _RUNNERS[:1], ("cudagraph_manager", "kv_connector")),
        Attributes("Worker", ("v1/worker/gpu_worker.py",), ("init_snapshot", "requested_memory", "model_runner")),
        Attributes("CudaGraphManager", ("v1/worker/gpu/cudagraph_utils.py",), ("graphs",)),
        Attributes("CUDAGraphWrapper", (_GRAPHS,), ("_all_instances", "concrete_cudagraph_entries")),
        Attributes("CUDAGraphEntry", (_GRAPHS,), ("cudagraph",)),
        Attributes("BreakableCUDAGraphWrapper", ("compilation/breakable_cudagraph.py",), ("_all_instances",)),
        Hook("KVCacheSpec.max_memory_usage_bytes", ("v1/kv_cache_interface.py",), ("self, vllm_config",)),
        Hook(
            "KVConnector.pre_forward",
            ("v1/worker/gpu/kv_connector.py",),
            ("self, scheduler_output", "self, scheduler_output, input_batch=None, attn_metadata=None"),
        ),
    ),
    "cpu": (
        Hook("CPUWorker.determine_available_memory", ("v1/worker/cpu_worker.py",), _PLAIN),
        Hook("CPUWorker.compile_or_warm_up_model", ("v1/worker/cpu_worker.py",), _PLAIN),
        Hook(
            "initialize_model",
            ("model_executor/model_loader/utils.py",),
            ("vllm_config, *, prefix='', model_class=None, model_config=None",),
        ),
        Hook("set_default_torch_dtype", ("utils/torch_utils.py",), ("dtype",)),
        Hook("SchedulerOutput.make_empty", ("v1/core/sched/output.py",), ("cls",)),
        Hook("Worker.execute_model", ("v1/worker/gpu_worker.py",), ("self, scheduler_output",)),
        Attributes(
            "GPUModelRunner",
            ("v1/worker/gpu_model_runner.py",),
            ("execute_model_state", "input_batch", "kv_cache_config"),
        ),
        Hook(
            "BaseModelLoader.load_model",
            ("model_executor/model_loader/base_loader.py",),
            ("self, vllm_config, model_config, prefix=''",),
        ),
        Hook(
            "QuantizeMethodBase.process_weights_after_loading",
            ("model_executor/layers/quantization/base_config.py",),
            ("self, layer",),
        ),
    ),
    "adapters": (
        *(Hook(f"{name}.compile_or_warm_up_model", (file,), _PLAIN) for name, file in _WORKERS),
        Hook("LRUCacheLoRAModelManager.activate_adapter", _MANAGER, ("self, lora_id",)),
        Hook("LRUCacheLoRAModelManager.pin_adapter", _MANAGER, ("self, lora_id",)),
        Hook("LoRAModelManager.set_adapter_mapping", _MANAGER, ("self, mapping",)),
        Hook("LoRAKernelMeta.prepare_tensors", ("lora/ops/triton_ops/lora_kernel_metadata.py",), _NUMBERS),
        Hook("PunicaWrapperBase._update_base_metadata", ("lora/punica_wrapper/punica_base.py",), _BASE_NUMBERS),
        Hook("LoRAModelManager._create_merged_loras_inplace", _MANAGER, ("self, lora_model",)),
        Hook("LoRAModelManager._get_lora_layer_weights", _MANAGER, ("self, lora_model, module_name",)),
        Hook("BaseLinearLayerWithLoRA.set_lora", _LINEAR[:1], ("self, index, lora_a, lora_b",)),
        Hook("MergedColumnParallelLinearWithLoRA.set_lora", _LINEAR[1:], ("self, index, lora_a, lora_b",)),
        Hook("BaseLinearLayerWithLoRA.reset_lora", _LINEAR[:1], ("self, index",)),
        Attributes("BaseLinearLayerWithLoRA", _LINEAR[:1], ("lora_a_stacked", "lora_b_stacked")),
        *(Hook(f"{name}.__init__", (file,), _START) for name, file in _WORKERS),
        Hook(
            "LoRAModel.__init__",
            ("lora/lora_model.py",),
            tuple(
                f"self, lora_model_id, rank, loras, is_3d_lora_weight=False{further}"
                for further in ("", ", *, modules_to_save=None")
            ),
        ),
        Attributes(
            "LoRAModelManager",
            _MANAGER,
            (
                *("lora_index_to_id", "lora_slots", "lora_config", "modules", "model", "punica_wrapper_mapping"),
                *("_registered_adapters", "_active_adapters", "_last_mapping", "_last_slot_layout"),
            ),
        ),
        Attributes("WorkerLoRAManager", ("lora/worker_manager.py",), ("_adapter_manager",)),
        Attributes("LoRAModelRunnerMixin", ("v1/worker/lora_model_runner_mixin.py",), ("lora_manager",)),
        Attributes(
            "PunicaWrapperBase",
            ("lora/punica_wrapper/punica_base.py",),
            ("indices_len", "_token_lora_indices", "_sampler_indices"),
        ),
        Attributes(
            "PunicaWrapperGPU", ("lora/punica_wrapper/punica_gpu.py",), ("token_mapping_meta", "prompt_mapping_meta")
        ),
        Attributes(
            "LoRAKernelMeta",
            ("lora/ops/triton_ops/lora_kernel_metadata.py",),
            ("token_lora_mapping", "active_lora_ids", "no_lora_flag_cpu"),
        ),
        Attributes(
            "OpenAIServingModels", ("entrypoints/openai/models/serving.py",), ("lora_requests", "base_model_paths")
        ),
        Hook(
            "LoRAModel.from_lora_tensors",
            ("lora/lora_model.py",),
            (
                "cls, lora_model_id, tensors, peft_helper, device='cuda', dtype=None, model_vocab_size=None, "
                "weights_mapper=None, skip_prefixes=None",
            ),
        ),
        Hook("PEFTHelper.from_dict", ("lora/peft_helper.py",), ("cls, config_dict",)),
    ),
    "server": (
        Hook("AsyncLLM.from_vllm_config", ("v1/engine/async_llm.py",), (_ENGINE,)),
        Hook("AsyncLLM.shutdown", ("v1/engine/async_llm.py",), ("self, timeout=None",)),
        Attributes(
            "AsyncLLM", ("v1/engine/async_llm.py",), ("engine_core", "output_processor", "errored", "dead_error")
        ),
        Hook("AsyncMPClient.call_utility_async", ("v1/engine/core_client.py",), ("self, method, *args",)),
        Hook("OutputProcessor.get_num_unfinished_requests", ("v1/engine/output_processor.py",), _PLAIN),
        Hook("EngineCore.collective_rpc", _CORE, ("self, method, timeout=None, args=(), kwargs=None",)),
        Hook("EngineCore.reset_prefix_cache", _CORE, ("self, reset_running_requests=False, reset_connector=False",)),
        Hook(
            "build_app",
            ("entrypoints/launchers/app.py", "entrypoints/openai/api_server.py"),
            ("args, supported_tasks=None, model_config=None",),
        ),
        Hook(
            "init_app_state",
            ("entrypoints/launchers/api_server/app_state.py", "entrypoints/openai/api_server.py"),
            ("engine_client, state, args, supported_tasks=None",),
        ),
        Hook(
            "make_arg_parser",
            ("entrypoints/common/cli_args.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py"),
            ("parser",),
        ),
    ),
}


def package() -> Path:
    """The folder of the installed vLLM's package, which is not imported. Raises HookChanged when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise HookChanged("vLLM is not installed")
    return Path(spec.submodule_search_locations[0])


def require(side: Side) -> None:
    """Checks the installed vLLM. Raises HookChanged with one line that names everything that changed."""
    root = package()
    if found := changes(root, side):
        raise HookChanged(f"the vLLM in {root} is not one that inflight supports: {'; '.join(found)}")


def locate(name: str) -> str:
    """The module of the installed vLLM that defines the server's function `name`. Raises HookChanged when none does."""
    (hook,) = (hook for hook in HOOKS["server"] if hook.name == name)
    sources = Sources(package())
    for file in hook.files:
        if sources.function(file, name) is not None:
            return "vllm." + file.removesuffix(".py").replace("/", ".")
    raise HookChanged(f"the installed vLLM has no {name} in {' or '.join(hook.files)}")


def changes(root: Path, side: Side) -> list[str]:
    """Differences between the package `vllm` at `root` and the table: one line per function or class."""
    sources = Sources(root)
    return [line for hook in HOOKS[side] for line in hook.changes(sources)]
