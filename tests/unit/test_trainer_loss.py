"""Log-probabilities, the objective and one step of the learner."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator
from rollout_samples import make_config, make_rollout

from inflight.config import GateConfig, TrainerConfig
from inflight.rollout.gate import gate_group
from inflight.trainer.batch import Batch, collate
from inflight.trainer.learner import Learner, LearnError, Stopped, warmup
from inflight.trainer.logprobs import require_plain_logits, token_logprobs
from inflight.trainer.loss import combine, objective
from inflight.trainer.policy import Policy, load_policy
from inflight.types import RolloutGroup


def make_batch(behaviour, advantages, trained=None, lags=None) -> Batch:
    """Sequences of one prompt token and the given completions."""
    behaviour = torch.tensor(behaviour)
    completion = torch.ones_like(behaviour, dtype=torch.bool)
    completion[:, 0] = False
    return Batch(
        input_ids=torch.ones_like(behaviour, dtype=torch.int64),
        completion_mask=completion,
        trained_mask=completion if trained is None else torch.tensor(trained),
        behaviour_logprobs=behaviour,
        versions=torch.zeros_like(behaviour, dtype=torch.int64),
        lags=torch.zeros_like(behaviour, dtype=torch.int64) if lags is None else torch.tensor(lags),
        advantages=torch.tensor(advantages),
    )


def learn(logprobs, batch, config=None):
    """The loss, the gradient of the log-probabilities and the stats."""
    leaf = torch.tensor(logprobs, requires_grad=True)
    loss, stats = objective(leaf, batch, config or TrainerConfig())
    loss.backward()
    return float(loss.detach()), leaf.grad, stats


def test_on_policy_the_gradient_is_minus_the_advantage():
    batch = make_batch([[0.0, -1.0, -2.0], [0.0, -3.0, -0.5]], [0.5, -0.5])
    loss, gradient, stats = learn(batch.behaviour_logprobs.tolist(), batch)
    assert loss == pytest.approx(0.0)
    assert gradient.tolist() == [[0.0, -0.5, -0.5], [0.0, 0.5, 0.5]]
    assert stats.values()["clip_share"] == 0.0


def test_the_ratio_weighs_the_gradient():
    batch = make_batch([[0.0, -1.0]], [2.0])
    loss, gradient, stats = learn([[0.0, -1.0 + math.log(1.1)]], batch)
    assert loss == pytest.approx(-2.2)
    assert gradient[0, 1] == pytest.approx(-2.2)
    assert stats.log_ratio_max == pytest.approx(math.log(1.1), abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "ratio", "clipped"),
    [
        (1.0, 1.5, True),
        (1.0, 1.25, False),
        (1.0, 0.1, False),
        (-1.0, 0.5, True),
        (-1.0, 0.85, False),
        (-1.0, 9.0, False),
    ],
)
def test_the_clip_binds_only_where_it_makes_the_objective_smaller(advantage, ratio, clipped):
    batch = make_batch([[0.0, -1.0]], [advantage])
    config = TrainerConfig(clip_low=0.2, clip_high=0.3)
    loss, gradient, stats = learn([[0.0, -1.0 + math.log(ratio)]], batch, config)
    bound = min(max(ratio, 0.8), 1.3)
    assert loss == pytest.approx(-min(ratio * advantage, bound * advantage), rel=1e-5)
    assert (gradient[0, 1] == 0) == clipped
    assert stats.clipped == int(clipped)


def test_a_masked_token_has_exactly_no_gradient_even_where_it_is_not_finite():
    batch = make_batch([[0.0, -1.0, float("-inf"), -1.0]], [1.0], trained=[[False, True, False, True]])
    loss, gradient, stats = learn([[0.0, -1.0, float("-inf"), -1.0]], batch)
    assert math.isfinite(loss)
    assert gradient.tolist() == [[0.0, -1.0, 0.0, -1.0]]
    assert stats.tokens == 2


def test_a_ratio_beyond_all_bounds_stays_finite():
    batch = make_batch([[0.0, -500.0]], [-1.0])
    loss, gradient, _ = learn([[0.0, -0.1]], batch)
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_stats_by_lag():
    batch = make_batch([[0.0, -1.0, -1.0, -1.0]], [0.0], lags=[[-1, 0, 3, 12]])
    _, _, stats = learn([[0.0, -1.1, -0.5, -2.0]], batch)
    values = combine([stats, stats]).values()
    assert values["log_ratio_by_lag"] == pytest.approx({"0": 0.1, "3": 0.5, "8": 1.0}, rel=1e-5)
    assert values["log_ratio_mean"] == pytest.approx((-0.1 + 0.5 - 1.0) / 3, rel=1e-5)
    assert values["log_ratio_max"] == pytest.approx(1.0)
    assert combine([stats, stats]).tokens == 6


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    return load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"))


def sequences(lengths=(5, 2, 7), version=0):
    members = [
        make_rollout(index=i, length=n, reward=float(i), token_ids=[(3 * i + t) % 17 for t in range(n)])
        for i, n in enumerate(lengths)
    ]
    group = RolloutGroup(group_id="g", prompt_key="k", rollouts=members)
    return collate([gate_group(group, version, GateConfig())], scale_by_std=False)


def test_log_probabilities_do_not_depend_on_padding_and_follow_the_temperature(policy):
    batch = sequences()
    with torch.no_grad():
        got = token_logprobs(policy.compute, batch.input_ids, batch.completion_mask, 0.7)
        for row in range(3):
            end = int(batch.completion_mask[row].nonzero().max()) + 1
            ids = batch.input_ids[row : row + 1, :end]
            full = (policy.master(ids).logits[0] / 0.7).log_softmax(dim=-1)
            expected = full[:-1].gather(1, ids[0, 1:, None])[2:, 0]  # the prompt has three tokens
            torch.testing.assert_close(got[row, 3:end], expected, rtol=0, atol=1e-5)
    assert not got[~batch.completion_mask].any()


def test_a_model_that_changes_its_logits_is_refused(policy):
    policy.master.config.final_logit_softcapping = 30.0
    try:
        with pytest.raises(ValueError, match="final_logit_softcapping=30"):
            require_plain_logits(policy.master)
    finally:
        del policy.master.config.final_logit_softcapping


def make_learner(tiny_model, tmp_path, bfloat16=False, **trainer) -> Learner:
    settings = TrainerConfig(**{"learning_rate": 1e-3, "micro_batch": 2} | trainer)
    config = make_config(tmp_path)
    object.__setattr__(config, "trainer", settings)
    policy = load_policy(tiny_model, bfloat16=bfloat16, device=torch.device("cpu"))
    return Learner(policy, config, Accelerator(cpu=True))


def never() -> bool:
    return False


def gradients(learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy.master.parameters()])


def test_micro_batches_give_the_gradient_of_the_whole_batch(tiny_model, tmp_path):
    batch, found = sequences((5, 2, 7, 3)), []
    for size in (1, 3, 4):
        learner = make_learner(tiny_model, tmp_path, micro_batch=size)
        loss, stats = learner.backward(batch, never)
        found.append((loss, gradients(learner)))
        assert stats.tokens == 17
    assert found[0][1].abs().max() > 0
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-7)


def test_masked_tokens_change_neither_gradient_nor_normalisation(tiny_model, tmp_path):
    """A masked tail gives the gradient of the sequence without it."""
    whole, cut = sequences((6, 6)), sequences((4, 4))
    whole.trained_mask[:, -2:] = False
    a, b = (make_learner(tiny_model, tmp_path) for _ in range(2))
    a.backward(whole, never)
    b.backward(cut, never)
    torch.testing.assert_close(gradients(a), gradients(b), rtol=1e-4, atol=1e-7)


def test_the_twin_computes_in_bfloat16_and_follows_the_float32_master(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, bfloat16=True)
    master, twin = learner.policy.master, learner.policy.compute
    assert {p.dtype for p in master.parameters()} == {torch.float32}
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert twin.base_model.rotary_emb.inv_freq.dtype == torch.float32, "rounded frequencies turn positions"
    before = [p.clone() for p in master.parameters()]
    learner.backward(sequences(), never)
    assert all(p.grad is None for p in twin.parameters())
    exact = make_learner(tiny_model, tmp_path)
    exact.backward(sequences(), never)
    cosine = torch.nn.functional.cosine_similarity(gradients(learner), gradients(exact), dim=0)
    assert cosine > 0.99
    learner.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, master.parameters(), strict=True))
    for ours, theirs in zip(master.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.to(torch.bfloat16), theirs)


def test_learning_raises_the_probability_of_what_was_rewarded(tiny_model, tmp_path):
    learner, batch = make_learner(tiny_model, tmp_path), sequences((4, 4))
    with torch.no_grad():
        fresh = token_logprobs(learner.policy.compute, batch.input_ids, batch.completion_mask, 1.0)
    batch.behaviour_logprobs.copy_(fresh)
    learner.backward(batch, never)
    learner.step()
    with torch.no_grad():
        after = token_logprobs(learner.policy.compute, batch.input_ids, batch.completion_mask, 1.0)
    change = (after - fresh).sum(dim=1)
    assert batch.advantages.tolist() == [-0.5, 0.5]
    assert change[0] < 0 < change[1]


def test_a_stop_gives_the_step_up_before_anything_has_changed(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, micro_batch=1)
    before = [p.clone() for p in learner.policy.master.parameters()]
    answers = iter([False, True])
    with pytest.raises(Stopped):
        learner.backward(sequences(), lambda: next(answers))
    assert all(p.grad is None for p in learner.policy.master.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.master.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_is_refused(tiny_model, tmp_path):
    learner, batch = make_learner(tiny_model, tmp_path), sequences()
    batch.advantages[0] = float("nan")
    learner.backward(batch, never)
    before = [p.clone() for p in learner.policy.master.parameters()]
    with pytest.raises(LearnError, match="nan"):
        learner.step()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.master.parameters(), strict=True))


def test_warmup():
    assert [warmup(4)(n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup(0)(0) == 1.0
