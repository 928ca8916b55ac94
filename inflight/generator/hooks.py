"""The functions of vLLM that inflight replaces, overrides or calls although they are not a public interface.

Each is listed with every signature that a supported vLLM version has. `require` compares them with the sources of the
installed vLLM before an engine starts, so that a changed function is refused by name instead of raising a TypeError in
the middle of a step. Sources are parsed, not imported: the check runs without a GPU and on an unpacked wheel (`make
verify-patches`). docs/patches.md describes how to add a version.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Side = Literal["cuda", "cpu", "server", "adapters"]
"""The part that uses a hook: the CUDA worker, the CPU worker (and the audit's engine), the HTTP server's process, or
the workers of engines whose LoRA adapters have versions."""

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class HookChanged(RuntimeError):
    """The installed vLLM changed the signature of a function that inflight depends on."""


@dataclass(frozen=True)
class Hook:
    """One function of vLLM."""

    name: str
    """`Class.method` or `function`."""
    files: tuple[str, ...]
    """Files that define it in supported versions, relative to the package `vllm`; every definition found must match."""
    signatures: tuple[str, ...]
    """Accepted parameter lists without annotations, as `ast.unparse` writes them."""


_RUNNERS = ("v1/worker/gpu/model_runner.py", "v1/worker/gpu_model_runner.py")
_FORWARD = "self, input_ids=None, positions=None, intermediate_tensors=None, inputs_embeds=None, **model_kwargs"
_ENGINE = (
    "cls, vllm_config, start_engine_loop=True, usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=None, "
    "enable_log_requests=False, aggregate_engine_logging=False, disable_log_stats=False, client_addresses=None, "
    "client_count=1, client_index=0"
)
_PLAIN = ("self",)
_NUMBERS = ("self, token_lora_mapping",)
_BASE_NUMBERS = ("self, mapping, lora_index_to_id, max_loras, vocab_size",)
_MANAGER = ("lora/model_manager.py",)
_WORKERS = (("Worker", "v1/worker/gpu_worker.py"), ("CPUWorker", "v1/worker/cpu_worker.py"))

HOOKS: dict[Side, tuple[Hook, ...]] = {
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
        Hook("BaseLinearLayerWithLoRA.set_lora", ("lora/layers/base_linear.py",), ("self, index, lora_a, lora_b",)),
        Hook("BaseLinearLayerWithLoRA.reset_lora", ("lora/layers/base_linear.py",), ("self, index",)),
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


def require(side: Side) -> None:
    """Checks the installed vLLM. Raises HookChanged with one line that names every changed function."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise HookChanged("vLLM is not installed")
    root = Path(spec.submodule_search_locations[0])
    if found := changes(root, side):
        raise HookChanged(f"the vLLM in {root} is not one that inflight supports: {'; '.join(found)}")


def locate(name: str) -> str:
    """The module of the installed vLLM that defines the server's function `name`. Raises HookChanged when none does."""
    (hook,) = (hook for hook in HOOKS["server"] if hook.name == name)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise HookChanged("vLLM is not installed")
    for file in hook.files:
        if _find(Path(spec.submodule_search_locations[0]) / file, name) is not None:
            return "vllm." + file.removesuffix(".py").replace("/", ".")
    raise HookChanged(f"the installed vLLM has no {name} in {' or '.join(hook.files)}")


def changes(root: Path, side: Side) -> list[str]:
    """Differences between the package `vllm` at `root` and the table: one line per function."""
    return [line for hook in HOOKS[side] for line in _changes(root, hook)]


def _changes(root: Path, hook: Hook) -> list[str]:
    known = " or ".join(f"({signature})" for signature in hook.signatures)
    found = {file: node for file in hook.files if (node := _find(root / file, hook.name)) is not None}
    if not found:
        return [f"{hook.name}{known} is in none of {', '.join(hook.files)}"]
    return [
        f"{file} has {hook.name}({_signature(node)}), known is {known}"
        for file, node in found.items()
        if _signature(node) not in hook.signatures
    ]


def _find(path: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    if not path.is_file():
        return None
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    node: Node | None = None
    for part in name.split("."):
        node = next((each for each in body if isinstance(each, Node) and each.name == part), None)
        if node is None:
            return None
        body = node.body
    return node if not isinstance(node, ast.ClassDef) else None


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Parameters and defaults; annotations are ignored, because their changes between versions have no effect."""
    arguments = node.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(arguments)
