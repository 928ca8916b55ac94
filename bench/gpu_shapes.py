"""Model shapes for benches: configurations only, weights are random and said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
}  # fmt: skip
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


def randomize(model: Any, seed: int) -> None:
    """New random weights in place: matrices normal with deviation 0.02, norms 1, biases small."""
    import torch

    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
