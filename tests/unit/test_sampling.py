"""The processed distribution against its definition, token by token in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import make_batch

from inflight.config import RolloutConfig, Sampling
from inflight.sampling import Recorded, processed_logprobs
from inflight.trainer.logprobs import score_tokens
from inflight.trainer.policy import load_policy

V = 12
PROMPT, OUTPUT = {1, 4}, {4: 2, 7: 1}
"""Tokens seen in the prompt, and how often which were drawn."""


def logits():
    return torch.randn(V, generator=torch.Generator().manual_seed(5)) * 2


def evidence(chosen=0, kept=None):
    before = [*sorted(PROMPT | OUTPUT.keys()), 0, 0]  # two that did not come
    return Recorded(
        chosen=torch.tensor([chosen]),
        kept=None if kept is None else torch.tensor([kept]),
        seen=torch.tensor([before]),
        in_prompt=torch.tensor([[token in PROMPT for token in before]]),
        drawn_before=torch.tensor([[OUTPUT.get(token, 0) for token in before]]),
    )


def expected(sampling):
    """The definition: penalties, temperature, min-p, top-k, top-p, and what is left made to sum to one."""
    values = logits().double().tolist()
    for token in range(V):
        if token in PROMPT or token in OUTPUT:
            values[token] *= 1 / sampling.repetition_penalty if values[token] > 0 else sampling.repetition_penalty
        values[token] -= sampling.frequency_penalty * OUTPUT.get(token, 0)
        values[token] -= sampling.presence_penalty * (token in OUTPUT)
        values[token] /= sampling.temperature
    left = set(range(V))
    largest = max(values)
    left -= {t for t in left if math.exp(values[t] - largest) < sampling.min_p}
    if sampling.top_k:
        left = set(sorted(left, key=lambda t: -values[t])[: sampling.top_k])
    mass = sum(math.exp(values[t]) for t in left)
    kept, total = set(), 0.0
    for token in sorted(left, key=lambda t: -values[t]):
        if total < sampling.top_p:
            kept.add(token)
        total += math.exp(values[token]) / mass
    mass = sum(math.exp(values[t]) for t in kept)
    return [values[t] - math.log(mass) if t in kept else -math.inf for t in range(V)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=4),
        Sampling(top_p=0.8, temperature=1.4),
        Sampling(min_p=0.1),
        Sampling(min_p=0.02, top_k=6, top_p=0.9, temperature=1.5),
        Sampling(repetition_penalty=1.6),
        Sampling(presence_penalty=0.7, frequency_penalty=0.4),
        Sampling(repetition_penalty=1.3, frequency_penalty=-0.5, temperature=0.8, top_k=5),
    ],
)
def test_the_distribution_is_that_of_its_definition(sampling):
    likeliest = int(torch.tensor(expected(sampling)).argmax())
    got = processed_logprobs(logits()[None], sampling, evidence(chosen=likeliest))[0].tolist()
    assert got == pytest.approx(expected(sampling), abs=1e-5)
    assert math.fsum(map(math.exp, got)) == pytest.approx(1, abs=1e-5)


def test_a_recorded_set_is_used_as_it_is():
    """The generator's weights were others: it kept tokens that ours would not."""
    rare = int(logits().argmin())
    got = processed_logprobs(logits()[None], Sampling(top_k=2), evidence(rare, kept=[rare, 3, -1, -1]))[0]
    assert [token for token in range(V) if got[token] > -math.inf] == sorted([rare, 3])
    assert float(got.exp().sum()) == pytest.approx(1)


def test_without_one_the_drawn_token_was_possible_all_the_same():
    rare = int(logits().argmin())
    got = processed_logprobs(logits()[None], Sampling(top_k=2), evidence(rare, kept=[-1, -1]))[0]
    assert int((got > -math.inf).sum()) == 3
    assert math.isfinite(got[rare])


def test_the_likeliest_token_is_always_left():
    got = processed_logprobs(logits()[None], Sampling(top_p=1e-9))[0]
    assert got.argmax() == logits().argmax()
    assert int((got > -math.inf).sum()) == 1


def test_what_is_cut_off_has_no_gradient():
    leaf = logits()[None].requires_grad_()
    chosen = int(leaf.argmax())
    processed_logprobs(leaf, Sampling(top_k=3), evidence(chosen))[0, chosen].backward()
    least = leaf[0].detach().topk(3).values.min()
    assert torch.isfinite(leaf.grad).all()
    assert not leaf.grad[0][leaf[0].detach() < least].any()
    assert leaf.grad[0].any()


def test_penalties_need_to_know_what_came_before():
    with pytest.raises(ValueError, match="which tokens came before"):
        processed_logprobs(logits()[None], Sampling(presence_penalty=1.0))


def test_a_runs_sampling():
    config = RolloutConfig(temperature=0.5, top_p=0.9, min_p=0.1, presence_penalty=0.3)
    assert Sampling.of(config) == Sampling(0.5, 0.9, 0, 0.1, 1.0, 0.3, 0.0)


def test_the_trainer_takes_the_sets_that_were_recorded_with_each_token(tiny_model):
    """Sets that these weights would not keep; the last token has none, and its own is computed."""
    policy = load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"))
    batch = make_batch(torch.zeros(2, 4), [0.0, 0.0])
    batch.input_ids.copy_(torch.tensor([[3, 4, 4, 5], [6, 7, 6, 2]]))
    sets = {(0, 1): [4, 9], (0, 2): [4, 1, 2], (0, 3): [5, 8], (1, 1): [7, 3, 11], (1, 2): [6, 0], (1, 3): []}
    kept = torch.full((2, 4, 3), -1)
    for (row, at), ids in sets.items():
        kept[row, at, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    batch = replace(batch, kept=kept)
    with torch.no_grad():
        plain = policy.compute(batch.input_ids).logits.float()
        for packing in (False, True):
            got = score_tokens(policy.compute, batch, Sampling(top_k=2), packing=packing).logprobs
            for (row, at), ids in sets.items():
                drawn, here = int(batch.input_ids[row, at]), plain[row, at - 1]
                left = here[sorted({drawn, *(ids or here.topk(2).indices.tolist())})]
                assert float(got[row, at]) == pytest.approx(float(here[drawn] - left.logsumexp(0)), abs=1e-5)


def test_penalties_count_what_was_drawn_before_each_token(tiny_model):
    """Token by token: the prompt is the first column, the padding of the second row is never seen."""
    policy = load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"))
    batch = make_batch(torch.zeros(2, 5), [0.0, 0.0])
    batch.input_ids.copy_(torch.tensor([[3, 4, 4, 5, 3], [6, 7, 6, 0, 0]]))
    batch.completion_mask[1, 3:] = False
    sampling = Sampling(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3)
    with torch.no_grad():
        got = score_tokens(policy.compute, batch, sampling).logprobs
        for row, length in ((0, 5), (1, 3)):
            ids = batch.input_ids[row, :length]
            plain = policy.compute(ids[None]).logits[0].float()
            for at in range(1, length):
                counts = torch.bincount(ids[1:at], minlength=plain.shape[-1])[None]
                every = torch.arange(plain.shape[-1])[None]
                wanted = processed_logprobs(
                    plain[at - 1 : at], sampling, Recorded(ids[at : at + 1], None, every, every == ids[0], counts)
                )
                assert float(got[row, at]) == pytest.approx(float(wanted[0, ids[at]]), abs=1e-5)
