"""Swaps of small random models of other architectures: biases, fused and transposed checkpoints, vLLM's backend for
transformers' own models. Each must equal a fresh engine bit for bit. And one that can't be swapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swap_engine import greedy, said, start, stop, swap, weights_file

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def qwen2(transformers: Any) -> Any:
    """Biases, tied; in bfloat16 small layers take the AMX path where the processor has it."""
    return transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True, dtype="bfloat16")


def gemma3(transformers: Any) -> Any:
    """Tied, scaled embeddings and norms."""
    return transformers.Gemma3TextConfig(**SHAPE, head_dim=32)


def phi3(transformers: Any) -> Any:
    """Projections that are fused in the checkpoint already."""
    return transformers.Phi3Config(**SHAPE)


def gpt2(transformers: Any) -> Any:
    """Transposed in the checkpoint, learned positions."""
    return transformers.GPT2Config(vocab_size=96, n_embd=128, n_layer=2, n_head=4, n_positions=256)


def olmo2(transformers: Any) -> Any:
    """Run by vLLM's backend for transformers' own models."""
    return transformers.Olmo2Config(**SHAPE)


def save(config: Any, directory: Path, seed: int) -> Path:
    """A random model of a configuration, norms and biases included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for param in model.parameters():
        param.data.add_(0.05 * torch.randn_like(param))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("make", [qwen2, gemma3, phi3, gpt2, olmo2], ids=lambda make: make.__name__)
def test_a_swap_equals_a_fresh_engine(make: Callable[[Any], Any], tmp_path: Path) -> None:
    import transformers

    config = make(transformers)
    a, b = save(config, tmp_path / "a", 1), save(config, tmp_path / "b", 2)
    dtype = "bfloat16" if "bfloat16" in str(config.dtype) else "float32"
    arguments = {"skip_tokenizer_init": True, "dtype": dtype}
    fresh = start(b, **arguments)
    of_b = said(greedy(fresh))
    stop(fresh)
    del fresh
    engine = start(a, **arguments)
    try:
        of_a = said(greedy(engine))
        swap(engine, weights_file(b), 1)
        assert said(greedy(engine)) == of_b
        swap(engine, weights_file(a), 2)
        assert said(greedy(engine)) == of_a
        assert of_a != of_b
    finally:
        stop(engine)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=32, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2
    )
    with pytest.raises(ValueError, match="swapping weights on CPU does not support mixture of experts"):
        start(save(config, tmp_path / "moe", 1), skip_tokenizer_init=True)
