"""The output layer, a chunk of draws at a time: a reference's numbers and gradients, in memory that is bounded."""

from __future__ import annotations

import weakref

import pytest
import torch
from batches import make_batch
from test_trainer_packing import sequences
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from inflight.config import Sampling
from inflight.sampling import Recorded, processed_logprobs
from inflight.trainer.draws import Draws
from inflight.trainer.head import LOGITS_AT_ONCE, Head
from inflight.trainer.logprobs import score_tokens

PLAIN = Sampling()
PENALISED = Sampling(
    temperature=0.8, top_p=0.9, top_k=12, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1
)
SAMPLINGS = {"plain": PLAIN, "cut": Sampling(temperature=0.6, top_p=0.95), "penalties and kept sets": PENALISED}
LENGTHS = (9, 2, 6, 1, 3, 8, 1)


def model_in(tiny_model, dtype):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype, attn_implementation="eager").eval()


def token_by_token(model, batch, sampling):
    """Log-probability and entropy of each draw by its definition, from the whole logits of its sequence alone."""
    logprobs, entropies = [], []
    for row, length in enumerate(batch.lengths().tolist()):
        ids = batch.input_ids[row, :length]
        logits = model(ids[None]).logits[0]
        every = torch.arange(logits.shape[-1])[None]
        for at in batch.completion_mask[row].nonzero()[:, 0].tolist():
            before = ids[:at][batch.completion_mask[row, :at]]
            counts = torch.bincount(before, minlength=logits.shape[-1])[None]
            prompt = torch.isin(every, ids[:at][~batch.completion_mask[row, :at]])
            kept = None if batch.kept is None else batch.kept[row, at][None]
            known = Recorded(ids[at][None], kept, every, prompt, counts)
            distribution = processed_logprobs(logits[at - 1][None], sampling, known)[0]
            possible = distribution[distribution > -torch.inf]
            logprobs.append(distribution[ids[at]])
            entropies.append(-(possible.exp() * possible).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def loss_and_gradient(model, logprobs, entropy):
    """Of some loss in which every draw has a weight of its own."""
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    loss = (weights * logprobs).sum() + 0.1 * (weights.square() * entropy).sum()
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), torch.cat([each.grad.flatten().double() for each in model.parameters()])


def distance(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_loss_and_gradients_are_those_of_a_float64_reference(tiny_model, name):
    """Whatever the chunk: one draw, several, and all at once.

    In float64 the gradient is the reference's to 1e-12. In float32 it can't be to 1e-6: the definition itself, from the
    whole logits of each sequence and without any chunk, is 1.1e-6 to 1.4e-6 away, which is how the model's layers
    round. So there the bound is that distance, with room for another order of summation (1.09 times, measured). The
    loss, and what a chunk changes in the gradient (4e-7 to 5e-7), are within 1e-6 in float32 too.
    """
    batch = sequences(LENGTHS, kept=name == "penalties and kept sets")
    sampling = SAMPLINGS[name]
    exact = model_in(tiny_model, torch.float64)
    wanted, gradient = loss_and_gradient(exact, *token_by_token(exact, batch, sampling))
    assert gradient.norm() > 1e-3
    single = model_in(tiny_model, torch.float32)
    rounding = distance(loss_and_gradient(single, *token_by_token(single, batch, sampling))[1], gradient)
    assert rounding < 3e-6
    for model, bound in ((exact, 1e-12), (single, 1.5 * rounding)):
        gradients = []
        for draws in (1, 7, 1000):
            at_once = draws * exact.config.vocab_size
            scores = score_tokens(model, batch, sampling, entropy_gradient=True, logits_at_once=at_once)
            assert scores.logprobs.dtype == model.dtype
            drawn = batch.completion_mask
            loss, found = loss_and_gradient(model, scores.logprobs[drawn], scores.entropy[drawn])
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert distance(found, gradient) < bound
            gradients.append(found)
        assert max(distance(each, gradients[0]) for each in gradients) < 1e-6


def make_head(layer, draws, chunk, sampling=PLAIN, entropy_gradient=False):
    """A head over made-up draws: one sequence, all but its first token sampled."""
    batch = make_batch(torch.zeros(1, draws + 1), [0.0])
    batch.input_ids.copy_(torch.arange(draws + 1)[None] % layer.out_features)
    return Head(layer, Draws(batch, sampling), sampling, entropy_gradient, chunk)


def test_an_output_layer_with_a_bias_and_one_that_is_not_trained():
    torch.manual_seed(0)
    hidden = torch.randn(10, 6, dtype=torch.float64)
    found = []
    for chunk in (3, 10):
        torch.manual_seed(1)
        layer = nn.Linear(6, 20).double()
        layer.weight.requires_grad_(False)
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = make_head(layer, 10, chunk)(leaf)
        assert not entropy.requires_grad
        logprobs.square().sum().backward()
        assert layer.weight.grad is None
        found.append((leaf.grad, layer.bias.grad))
    for ours, theirs in zip(*found, strict=True):
        assert theirs.norm() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_chunks_in_bfloat16_lose_nothing_of_the_gradient():
    """Its error against float64 is no larger than that of all draws at once: a sum in bfloat16 would be."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1024, 16).bfloat16(), (torch.randn(50, 16) / 4).bfloat16()

    def gradient(chunk, dtype):
        layer = nn.Linear(16, 50, bias=False, dtype=dtype)
        layer.weight = nn.Parameter(weight.to(dtype))
        make_head(layer, 1024, chunk)(hidden.to(dtype))[0].sum().backward()
        return layer.weight.grad.double()

    exact = gradient(1024, torch.float64)
    chunked, whole = (float((gradient(n, torch.bfloat16) - exact).norm() / exact.norm()) for n in (8, 1024))
    assert whole > 1e-4
    assert chunked < 1.2 * whole


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage):
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size):
        self.now -= size


def memory(draws, vocabulary, chunk, sampling):
    """Bytes at the peak of forward and backward, and those that the forward pass keeps for the backward pass."""
    layer = nn.Linear(4, vocabulary, bias=False)
    hidden, saved = torch.randn(draws, 4, requires_grad=True), []
    head = make_head(layer, draws, chunk, sampling, entropy_gradient=True)
    with LiveBytes() as live:
        with saving(saved):
            logprobs, entropy = head(hidden)
        (logprobs.sum() + entropy.sum()).backward()
    return live.peak, sum(saved)


def saving(nbytes):
    """Notes the bytes of what autograd keeps meanwhile."""
    return torch.autograd.graph.saved_tensors_hooks(lambda each: nbytes.append(each.nbytes) or each, lambda each: each)


@pytest.mark.parametrize("name", ["plain", "cut"])
def test_memory_does_not_grow_with_draws_times_vocabulary(name):
    vocabulary, chunk = 4_001, 16
    few, many = (memory(draws, vocabulary, chunk, SAMPLINGS[name]) for draws in (32, 256))
    by_draw = (many[0] - few[0]) / (256 - 32)
    assert by_draw < 400, "hidden states, log-probabilities and ids, of a logit's 4 bytes nothing"
    assert (many[1] - few[1]) / (256 - 32) < 400
    whole = memory(256, vocabulary, 256, SAMPLINGS[name])
    assert whole[0] > 8 * many[0], "what is bounded here is what grows elsewhere"


def test_the_chunk_of_a_run_holds_a_bounded_number_of_logits():
    """What a real vocabulary is cut to by default, and that it is cut at all: nothing of the logits is kept."""
    vocabulary, draws = 151_936, 900
    assert draws * vocabulary > LOGITS_AT_ONCE
    hidden, layer = torch.randn(draws, 2, requires_grad=True), nn.Linear(2, vocabulary, bias=False)
    saved = []
    with saving(saved):
        make_head(layer, draws, LOGITS_AT_ONCE // vocabulary)(hidden)[0].sum()
    assert sum(saved) < 2 * layer.weight.nbytes
