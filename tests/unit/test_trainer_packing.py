"""Sequences end to end in a row: the same log-probabilities, loss and gradient as with a padded row each."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers.masking_utils
from accelerate import Accelerator
from rollout_samples import make_config, make_rollout
from transformers import AutoModelForCausalLM

from inflight.config import GateConfig, ObjectiveConfig, Sampling, TrainerConfig
from inflight.rollout.gate import gate_group
from inflight.trainer.advantage import group_mean
from inflight.trainer.apart import require_apart
from inflight.trainer.batch import collate
from inflight.trainer.learner import Learner
from inflight.trainer.logprobs import score_tokens
from inflight.trainer.packing import packed
from inflight.trainer.policy import load_policy
from inflight.types import RolloutGroup

LENGTHS = (9, 2, 6, 1, 3, 8, 1)
CUT = Sampling(
    temperature=0.8, top_p=0.9, top_k=12, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1
)


def sequences(lengths=LENGTHS, kept=True):
    """A batch of these completions behind a prompt of three tokens; some have recorded sets of what was kept."""
    members = []
    for index, length in enumerate(lengths):
        ids = [(5 * index + 3 * at) % 17 for at in range(length)]
        sets = (
            [[token, (token + 5) % 17] if at % 2 else [] for at, token in enumerate(ids)]
            if kept and index % 2
            else None
        )
        members.append(
            make_rollout(
                index=index,
                length=length,
                reward=float(index % 3),
                token_ids=ids,
                kept=sets if kept and index % 2 else None,
            )
        )
    group = RolloutGroup(group_id="g", prompt_key="k", rollouts=members)
    return collate([gate_group(group, 0, GateConfig())], advantage=group_mean, normalise="token", max_tokens=16)


@pytest.fixture(params=["eager", "sdpa"])
def model(tiny_model, request):
    return AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation=request.param
    ).eval()


def test_where_sequences_lie():
    """10, 6 + 4 and 5 + 3: the longest first, each where the least is left over."""
    ids, lengths = torch.arange(50).view(5, 10), torch.tensor([5, 10, 3, 4, 6])
    rows = packed(ids, lengths)
    assert rows.row.tolist() == [2, 0, 2, 1, 1]
    assert rows.start.tolist() == [0, 0, 5, 6, 0]
    assert rows.input_ids[1].tolist() == [40, 41, 42, 43, 44, 45, 30, 31, 32, 33]
    assert rows.input_ids[2].tolist() == [0, 1, 2, 3, 4, 20, 21, 22, 0, 0]
    assert rows.position_ids[1:].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]]


def test_what_does_not_fit_together_stays_as_it_is():
    ids = torch.arange(8).view(2, 4)
    rows = packed(ids, torch.tensor([4, 3]))
    assert rows.input_ids is ids
    assert rows.position_ids is None


@pytest.mark.parametrize("sampling", [Sampling(), CUT], ids=["plain", "cut"])
def test_log_probabilities_entropy_and_gradient_are_those_of_padded_rows(model, sampling):
    batch = sequences()
    assert packed(batch.input_ids, batch.lengths()).input_ids.shape == (5, 12), "seven sequences in five rows"
    found = []
    for packing in (False, True):
        scores = score_tokens(model, batch, sampling, entropy_gradient=True, packing=packing)
        model.zero_grad()
        (scores.logprobs.square().sum() + scores.entropy.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((scores.logprobs.detach(), scores.entropy.detach(), gradient / gradient.norm()))
    assert found[0][0].min() < -1, "something was drawn"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_token_of_one_sequence_changes_nothing_in_another(model):
    batch = sequences(kept=False)
    rows = packed(batch.input_ids, batch.lengths())
    changed = sequences(kept=False)
    shares = next(row for row in range(5) if (rows.row == row).sum() > 1)
    first, *others = sorted((rows.row == shares).nonzero()[:, 0].tolist(), key=lambda b: int(rows.start[b]))
    changed.input_ids[first, 1:4] = torch.tensor([16, 15, 14])
    with torch.no_grad():
        before, after = (score_tokens(model, each, Sampling(), packing=True).logprobs for each in (batch, changed))
    assert not torch.equal(before[first], after[first])
    for other in others:
        assert torch.equal(before[other], after[other])


def test_a_model_that_does_not_keep_them_apart_is_refused(model, monkeypatch):
    name, score = type(model).__name__, functools.partial(score_tokens, model)
    require_apart(score, model.device, name)
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    problem = r"trainer.packing=true: LlamaForCausalLM does not separate sequences in a row"
    with pytest.raises(ValueError, match=problem):
        require_apart(score, model.device, name)


def computed(*models):
    """Fills with the shapes of what the models are given."""
    shapes = []
    for each in models:
        each.register_forward_pre_hook(
            lambda _, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
        )
    return shapes


SHAPES = {
    (7,): [(7, 12)],
    (7, True): [(5, 12)],
    (3, True): [(2, 12), (2, 11), (2, 9)],
    (24,): [(2, 12), (2, 9), (3, 5)],
    (24, True): [(2, 11), (2, 9), (1, 12), (2, 6)],
}
"""What the model is given, by how the batch is cut."""


@pytest.mark.parametrize("settings", [{}, {"name": "gspo"}, {"name": "reinforce", "kl": 0.3, "entropy": 0.1}], ids=str)
def test_a_learner_computes_the_same(tiny_model, tmp_path, settings):
    """Losses, gradients and stats, in micro-batches of several sizes; the divergence's reference is packed as well."""
    found = []
    cuts = ({"micro_batch": 7}, {"micro_batch": 7, "packing": True}, {"micro_batch": 3, "packing": True})
    for cut in (*cuts, {"micro_batch_tokens": 24}, {"micro_batch_tokens": 24, "packing": True}):
        packing = cut.get("packing", False)
        config = make_config(tmp_path)
        trainer = TrainerConfig(**cut, objective=ObjectiveConfig(**settings))
        object.__setattr__(config, "trainer", trainer)
        policy, start = (
            load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"), packing=packing) for _ in range(2)
        )
        with torch.no_grad():
            for parameter in start.master.parameters():
                parameter.mul_(1.01)
        start.master.requires_grad_(False)
        learner = Learner(policy, config, Accelerator(cpu=True), start)
        shapes = computed(policy.master.base_model, start.master.base_model)
        loss, stats = learner.backward(sequences(kept=False), lambda: False)
        models = 2 if "kl" in settings else 1
        assert shapes == [shape for shape in SHAPES[tuple(cut.values())] for _ in range(models)]
        gradient = torch.cat([p.grad.flatten() for p in policy.master.parameters()])
        found.append((loss, gradient, stats.values()["entropy"], stats.values()["log_ratio_std"]))
    padded, *others = found
    assert padded[1].norm() > 1e-3
    for each in others:
        assert each[0] == pytest.approx(padded[0], abs=1e-5)
        assert float((each[1] - padded[1]).norm() / padded[1].norm()) < 1e-5
        assert each[2:] == pytest.approx(padded[2:], abs=1e-5)


def test_mixed_micro_batches_hold_long_and_short_ones():
    batch = sequences()
    parts = [batch.rows(rows) for rows in batch.cut(3, mixed=True)]
    assert [part.lengths().tolist() for part in parts] == [[12, 6, 4], [11, 5], [9, 4]]
    assert sorted(s for part in parts for s in part.scales.tolist()) == sorted(batch.scales.tolist())
