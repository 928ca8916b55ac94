"""On a GPU: variable-length attention against sdpa, and what a micro-batch's logits take."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from inflight.config import Sampling
from inflight.trainer.batch import Batch, to_score
from inflight.trainer.logprobs import score_tokens
from inflight.trainer.recompute import recompute_layers
from inflight.trainer.varlen import VARLEN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
CONFIGS = {"full": LlamaConfig(**SHAPE), "sliding": MistralConfig(**SHAPE, sliding_window=100)}
LENGTHS = (700, 31, 412, 2, 256, 699)


def sequences(lengths, vocabulary, seed=0) -> Batch:
    """Random tokens, the first half of each sequence a prompt."""
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (len(lengths), max(lengths)), generator=noise)
    at, length = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    return to_score(ids, (at >= length // 2) & (at < length) & (at > 0)).to(torch.device("cuda"))


def learnt(model, batch, *, packing):
    """Log-probabilities and the gradient of some loss, float64 on the CPU."""
    model.zero_grad()
    scores = score_tokens(model, batch, Sampling(), packing=packing)
    scores.logprobs.sum().backward()
    gradient = torch.cat([each.grad.flatten().double().cpu() for each in model.parameters()])
    return scores.logprobs.detach().double().cpu(), gradient


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_variable_length_attention_is_as_near_to_float32_as_sdpa_with_a_row_each(name):
    """Both compute in bfloat16; the distance of each to the same weights in float32, sdpa, is rounding."""
    torch.manual_seed(0)
    batch = sequences(LENGTHS, SHAPE["vocab_size"])
    found = {}
    start = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.bfloat16).state_dict()
    ways = {
        "exact": ("sdpa", torch.float32, False),
        "sdpa": ("sdpa", torch.bfloat16, False),
        "varlen": (VARLEN, torch.bfloat16, True),
    }
    for way, (attention, dtype, packing) in ways.items():
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(CONFIGS[name]), dtype=dtype, attn_implementation=attention
        )
        model.load_state_dict(start)
        found[way] = learnt(model.to("cuda").eval(), batch, packing=packing)
    for ours, sdpa, exact in zip(found["varlen"], found["sdpa"], found["exact"], strict=True):
        assert 0 < distance(sdpa, exact) < 0.1
        assert distance(ours, exact) < 1.5 * distance(sdpa, exact)


def test_other_sequences_change_nothing():
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["full"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=VARLEN).to("cuda").eval()
    batch = sequences(LENGTHS, SHAPE["vocab_size"])
    others = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    others.input_ids[:3] = (others.input_ids[:3] + 1) % SHAPE["vocab_size"]
    with torch.no_grad():
        ours, theirs = (score_tokens(model, each, Sampling(), packing=True).logprobs for each in (batch, others))
    assert not torch.equal(ours[:3], theirs[:3])
    assert torch.equal(ours[3:], theirs[3:])


def test_memory_of_the_output_layer_does_not_grow_with_the_tokens():
    """A vocabulary of 151,936: 8,192 draws would be 15 GiB at 12 bytes a logit, 4,096 half of it."""
    config = LlamaConfig(**(SHAPE | {"vocab_size": 151_936, "max_position_embeddings": 8192}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to("cuda").eval()
    recompute_layers(model)
    peaks = []
    for sampling in (Sampling(), Sampling(temperature=0.6, top_p=0.95)):
        for length in (4096, 8192):
            batch = sequences([2 * length], 151_936)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            score_tokens(model, batch, sampling).logprobs.sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() / 2**30)
    print("peak GiB", peaks)
    for few, many in zip(peaks[::2], peaks[1::2], strict=True):
        assert many < few + 1.0
    assert max(peaks) < 10
