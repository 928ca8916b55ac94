"""LoRA adapters on disk as PEFT writes them, the same as a publisher sends them, and an engine that swaps them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from swap_engine import start

from inflight.generator.settings import Settings

WORKER = "inflight.generator.worker.adapter_cpu.InflightCPUAdapterWorker"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(model: Path, folder: Path, seed: int, rank: int = 8, alpha: int = 20, modules: Any = MODULES) -> Path:
    """A PEFT directory of a random adapter that moves every layer; returns the file that a publisher's bytes equal,
    in which B is scaled by alpha / sqrt(rank)."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    noise, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            part = "self_attn" if module in MODULES[:4] else "mlp"
            name, (out, into) = f"base_model.model.model.layers.{layer}.{part}.{module}", shapes[module]
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, into, generator=noise) / math.sqrt(into)
            tensors[f"{name}.lora_B.weight"] = 0.1 * torch.randn(out, rank, generator=noise)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": True,
        "target_modules": list(modules),
        "bias": "none",
        "base_model_name_or_path": str(model),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    scaled = {
        name: tensor * (alpha / math.sqrt(rank)) if ".lora_B." in name else tensor for name, tensor in tensors.items()
    }
    save_file(scaled, folder / "sent.safetensors", metadata={"format": "pt"})
    return folder / "sent.safetensors"


def start_adapters(model: Path, names: list[str], **arguments: Any) -> Any:
    """An engine in this process, whose adapters of these names have versions."""
    settings = Settings(adapters=names).as_additional_config()
    lora = {"enable_lora": True, "max_loras": len(names) + 1, "max_lora_rank": 16}
    return start(model, **{"worker_cls": WORKER, "additional_config": settings, **lora, **arguments})
