"""Model shapes for benches: configurations only, weights are random and said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
}
"""Qwen2's."""


def config_of(shape: str, *, tied: bool = False, positions: int = 32768) -> Any:
    """The transformers configuration of a shape. Raises ValueError naming the shapes there are."""
    from transformers import Qwen2Config

    if shape not in SHAPES:
        raise ValueError(f"no model shape is named {shape!r}: {', '.join(SHAPES)} are")
    return Qwen2Config(
        **SHAPES[shape],
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )


def write_config(shape: str, folder: Path, *, tied: bool = False) -> Path:
    """A folder that vLLM can start from with `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    config_of(shape, tied=tied).save_pretrained(folder)
    return folder


def random_model(shape: str, device: str, seed: int, *, tied: bool = False) -> Any:
    """A transformers model with random weights of standard deviation 0.02, made on `device` in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, tied=tied), dtype=torch.bfloat16)
    model = model.to_empty(device=device)
    if tied:
        model.tie_weights()
    randomize(model, seed)
    return model.requires_grad_(False)


LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The modules of a layer that an adapter is trained for."""


def random_adapter(shape: str, rank: int, device: str, seed: int) -> Any:
    """A module whose parameters are a LoRA adapter's matrices in bfloat16, named as PEFT's checkpoints name them; B is
    scaled already. Random, of sizes at which each layer's output moves."""
    import torch
    from torch import nn

    model = nn.Module()
    noise = torch.Generator(device=device).manual_seed(seed)
    for layer in range(SHAPES[shape]["num_hidden_layers"]):
        for module in LINEAR:
            into, out = _features(shape, module)
            for leaf, size, deviation in (("lora_A", (rank, into), into**-0.5), ("lora_B", (out, rank), 0.05)):
                values = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, deviation, generator=noise)
                place = _nested(model, f"base_model.model.model.layers.{layer}.{module}.{leaf}")
                place.weight = nn.Parameter(values, requires_grad=False)
    return model


def save_adapter(shape: str, rank: int, folder: Path, device: str, seed: int = 1) -> Path:
    """A PEFT directory of a random adapter, and in it `sent.safetensors`: what a publisher would send."""
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    adapter = random_adapter(shape, rank, device, seed)
    tensors = {name: tensor.detach().cpu() for name, tensor in adapter.named_parameters()}
    for name in ("adapter_model.safetensors", "sent.safetensors"):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    modules = [module.rpartition(".")[2] for module in LINEAR]
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def _features(shape: str, module: str) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    sizes = SHAPES[shape]
    hidden = sizes["hidden_size"]
    inner = sizes["intermediate_size"]
    kv = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    outputs = {"k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}
    leaf = module.rpartition(".")[2]
    return (inner if leaf == "down_proj" else hidden), outputs.get(leaf, hidden)


def _nested(model: Any, path: str) -> Any:
    """The submodule at a dotted path, made where it is not there."""
    from torch import nn

    for part in path.split("."):
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model._modules[part]
    return model


def randomize(model: Any, seed: int) -> None:
    """New random weights in place: matrices normal with deviation 0.02, norms 1, biases small."""
    import torch

    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
