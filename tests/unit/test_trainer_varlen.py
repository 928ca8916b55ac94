"""Variable-length attention: what the kernel is given. It needs a GPU itself (tests/gpu/test_trainer_memory.py):
its definition is in its place."""

from __future__ import annotations

import copy

import pytest
import torch
from test_trainer_packing import sequences
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config

from inflight.config import Sampling
from inflight.trainer import varlen
from inflight.trainer.loading import attention_for, ready
from inflight.trainer.logprobs import score_tokens
from inflight.trainer.varlen import VARLEN, fits

SHAPE = {
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "sliding": MistralConfig(**SHAPE, sliding_window=5),
    "both": Qwen3Config(
        **SHAPE, use_sliding_window=True, sliding_window=4, layer_types=["full_attention", "sliding_attention"]
    ),
}
LENGTHS = (9, 2, 6, 1, 3, 8, 1)


def by_definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """As torch documents `varlen_attn`: [T, heads, D], causal within each sequence and window."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    found = []
    for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        q, k, v = (each[start:end].transpose(0, 1) for each in (query, key, value))
        ago = torch.arange(end - start)[:, None] - torch.arange(end - start)
        allowed = (ago >= 0) & ((ago <= window_size[0]) | (window_size[0] == -1))
        assert window_size[1] == 0
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=allowed, scale=scale, enable_gqa=enable_gqa
        )
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("packing", [False, True])
def test_the_kernel_is_asked_for_what_the_mask_says(name, packing, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)
    torch.manual_seed(0)
    plain, other = (
        AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=each).double()
        for each in ("sdpa", VARLEN)
    )
    assert (plain.eval().config._attn_implementation, other.config._attn_implementation) == ("sdpa", VARLEN)
    other.load_state_dict(plain.state_dict())
    shapes, batch, found = [], sequences(LENGTHS), []
    ready(other).base_model.register_forward_pre_hook(
        lambda _, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    for model, packed in ((plain, False), (other, packing)):
        logprobs = score_tokens(model, batch, Sampling(), packing=packed).logprobs
        logprobs.square().sum().backward()
        found.append((logprobs.detach(), torch.cat([each.grad.flatten() for each in model.parameters()])))
    assert shapes == [(1, int(batch.lengths().sum())) if packing else (7, 12)], "packed, nothing is padded"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_where_it_is_chosen():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert attention_for(cuda, torch.bfloat16, packing=True) == VARLEN
    assert attention_for(cuda, torch.float32, packing=True) == "sdpa", "the kernel has no float32"
    assert attention_for(cuda, torch.bfloat16, packing=False) == "sdpa"
    assert attention_for(cpu, torch.bfloat16, packing=True) == "eager"


def test_attention_that_the_kernel_does_not_have_stays_with_a_mask():
    odd = Gemma2Config(**SHAPE, attn_logit_softcapping=50.0)
    assert not fits(odd)
    assert not fits(LlamaConfig(**(SHAPE | {"head_dim": 512})))
    wide = AutoModelForCausalLM.from_config(LlamaConfig(**(SHAPE | {"head_dim": 512})), attn_implementation=VARLEN)
    assert ready(wide).config._attn_implementation == "sdpa"
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="Module needs softcap, which variable-length attention does not have"):
        varlen.attend(torch.nn.Module(), query, query, query, None, softcap=50.0)
