"""Gradient checkpointing: the same gradients from fewer kept activations, without dropout."""

from __future__ import annotations

import pytest
import torch
from test_trainer_head import saving
from test_trainer_packing import sequences
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from inflight.config import Sampling
from inflight.trainer.policy import load_policy
from inflight.trainer.recompute import recompute_layers


def learnt(tiny_model, *, gradient_checkpointing, bfloat16, packing):
    """Gradients of the master weights, and the bytes that the forward pass has kept."""
    policy = load_policy(
        tiny_model,
        bfloat16=bfloat16,
        device=torch.device("cpu"),
        packing=packing,
        gradient_checkpointing=gradient_checkpointing,
    )
    kept = []
    with saving(kept):
        scores = policy.score(sequences((40, 9, 30)), Sampling(), packing=packing)
    scores.logprobs.sum().backward()
    policy.collect_gradients()
    return torch.cat([each.grad.flatten() for each in policy.master.parameters()]), sum(kept)


@pytest.mark.parametrize(("bfloat16", "packing"), [(False, False), (True, True)])
def test_gradients_are_the_same_and_less_is_kept(tiny_model, bfloat16, packing):
    (whole, kept), (again, left) = (
        learnt(tiny_model, gradient_checkpointing=each, bfloat16=bfloat16, packing=packing) for each in (False, True)
    )
    assert whole.norm() > 0
    assert torch.equal(whole, again)
    assert left < kept / 5


def test_a_layer_computes_in_evaluation_mode_the_first_time_and_again(tiny_model):
    policy = load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"), gradient_checkpointing=True)
    layers, seen = policy.compute.base_model.layers, []
    layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.training))
    policy.score(sequences(), Sampling()).logprobs.sum().backward()
    assert seen == [False, False]
    assert not any(each.training for each in policy.compute.modules() if each not in set(layers))


def test_a_model_without_such_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=4))
    model.transformer.h = nn.ModuleList()
    with pytest.raises(ValueError, match=r"gradient_checkpointing=true: GPT2LMHeadModel has no layers that support it"):
        recompute_layers(model)
