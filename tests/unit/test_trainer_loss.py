"""Log-probabilities, the objective and one step of the learner."""

from __future__ import annotations

import dataclasses
import math
import shutil
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from batches import make_batch
from rollout_samples import make_config, make_rollout
from safetensors.torch import load_file, save_file

from inflight.config import GateConfig, ObjectiveConfig, Sampling, TrainerConfig
from inflight.rollout.gate import gate_group
from inflight.trainer.advantage import group_mean
from inflight.trainer.batch import collate
from inflight.trainer.learner import Learner, Stopped
from inflight.trainer.logprobs import Scores, require_plain_logits, score_tokens
from inflight.trainer.loss import Loss
from inflight.trainer.objectives.ppo import ppo
from inflight.trainer.policy import Policy, load_policy
from inflight.trainer.split import rounds
from inflight.trainer.stats import LAGS, combine
from inflight.types import RolloutGroup


def learn(logprobs, batch, **options):
    """PPO's loss, the gradient of the log-probabilities and the stats."""
    leaf = torch.tensor(logprobs, requires_grad=True)
    loss, stats = Loss(partial(ppo, **options), "token")(Scores(leaf, torch.full_like(leaf, 0.3)), batch)
    loss.backward()
    return float(loss.detach()), leaf.grad, stats


def test_on_policy_the_gradient_is_minus_the_advantage():
    batch = make_batch([[0.0, -1.0, -2.0], [0.0, -3.0, -0.5]], [0.5, -0.5])
    loss, gradient, stats = learn(batch.behaviour_logprobs.tolist(), batch)
    assert loss == pytest.approx(0.0)
    assert (gradient * 4).tolist() == [[0.0, -0.5, -0.5], [0.0, 0.5, 0.5]]
    assert stats.values()["clip_share"] == 0.0


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
    loss, gradient, stats = learn([[0.0, -1.0 + math.log(ratio)]], batch, clip_low=0.2, clip_high=0.3)
    bound = min(max(ratio, 0.8), 1.3)
    assert loss == pytest.approx(-min(ratio * advantage, bound * advantage), rel=1e-5)
    assert (gradient[0, 1] == 0) == clipped
    assert stats.values()["clip_share"] == int(clipped)


def test_a_ratio_beyond_all_bounds_stays_finite():
    batch = make_batch([[0.0, -500.0]], [-1.0])
    loss, gradient, _ = learn([[0.0, -0.1]], batch)
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_stats_by_lag():
    """Three trained tokens of lags 0, 3 and 12; one of lag 12 that the gate has masked."""
    lags = [[-1, 0, 3, 12, 12]]
    batch = make_batch([[0.0, -1.0, -1.0, -1.0, -1.0]], [0.0], lags=lags, trained=[[False, True, True, True, False]])
    batch.completion_mask[0, 4] = True
    _, _, stats = learn([[0.0, -1.1, -0.5, -2.0, 5.0]], batch)
    values = combine([stats, stats]).values()
    assert values["log_ratio_mean"] == pytest.approx((-0.1 + 0.5 - 1.0) / 3, rel=1e-5)
    assert values["log_ratio_max"] == pytest.approx(1.0)
    assert values["tail_share"] == pytest.approx(1 / 3)
    weights = [math.exp(each) for each in (-0.1, 0.5, -1.0)]
    assert values["ess"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)), rel=1e-5)
    assert values["kl"] == pytest.approx((sum(weights) - 3 + 0.6) / 3, rel=1e-5)
    assert values["entropy"] == pytest.approx(0.3)
    by_lag = values["by_lag"]
    assert list(by_lag) == ["0", "3", "12"]
    assert [row["log_ratio_mean"] for row in by_lag.values()] == pytest.approx([-0.1, 0.5, -1.0], rel=1e-5)
    assert [row["log_ratio_std"] for row in by_lag.values()] == pytest.approx([0, 0, 0], abs=1e-6)
    assert [row["tokens"] for row in by_lag.values()] == [2, 2, 2]
    assert [row["gated"] for row in by_lag.values()] == [0, 0, 2]
    assert [row["ess"] for row in by_lag.values()] == pytest.approx([1, 1, 1])
    assert combine([stats, stats]).tokens == 6


def test_lags_beyond_the_table_share_its_last_row():
    batch = make_batch([[0.0, -1.0, -1.0]], [0.0], lags=[[-1, LAGS - 1, 1000]])
    _, _, stats = learn([[0.0, -1.0, -1.0]], batch)
    assert {lag: row["tokens"] for lag, row in stats.values()["by_lag"].items()} == {str(LAGS - 1): 2}


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    return load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"))


def sequences(lengths=(5, 2, 7), version=0):
    members = [
        make_rollout(index=i, length=n, reward=float(i), token_ids=[(3 * i + t) % 17 for t in range(n)])
        for i, n in enumerate(lengths)
    ]
    group = RolloutGroup(group_id="g", prompt_key="k", rollouts=members)
    gated = [gate_group(group, version, GateConfig())]
    return collate(gated, advantage=group_mean, normalise="token", max_tokens=16)


def test_log_probabilities_do_not_depend_on_padding_and_follow_the_temperature(policy):
    batch = sequences()
    with torch.no_grad():
        scores = score_tokens(policy.compute, batch, Sampling(temperature=0.7))
        got = scores.logprobs
        for row in range(3):
            end = int(batch.completion_mask[row].nonzero().max()) + 1
            ids = batch.input_ids[row : row + 1, :end]
            full = (policy.master(ids).logits[0] / 0.7).log_softmax(dim=-1)
            expected = full[:-1].gather(1, ids[0, 1:, None])[2:, 0]  # the prompt has three tokens
            torch.testing.assert_close(got[row, 3:end], expected, rtol=0, atol=1e-5)
            entropy = -(full.exp() * full).sum(dim=-1)[2 : end - 1]
            torch.testing.assert_close(scores.entropy[row, 3:end], entropy, rtol=0, atol=1e-5)
    assert not got[~batch.completion_mask].any()


def test_a_model_that_changes_its_logits_is_refused(policy):
    policy.master.config.final_logit_softcapping = 30.0
    try:
        with pytest.raises(ValueError, match="final_logit_softcapping=30"):
            require_plain_logits(policy.master)
    finally:
        del policy.master.config.final_logit_softcapping


def make_learner(tiny_model, tmp_path, bfloat16=False, reference=None, **trainer) -> Learner:
    settings = TrainerConfig(**{"learning_rate": 1e-3, "micro_batch": 2} | trainer)
    config = make_config(tmp_path)
    object.__setattr__(config, "trainer", settings)
    policy = load_policy(tiny_model, bfloat16=bfloat16, device=torch.device("cpu"))
    return Learner(policy, config, Accelerator(cpu=True), reference)


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
    whole.scales.copy_(cut.scales)
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


def test_a_rank_without_work_counts_nothing(tiny_model, tmp_path):
    """Three sequences, one a micro-batch, for two ranks: the fourth place is filled with one that weighs nothing."""
    batch, learner = sequences((5, 2, 7)), make_learner(tiny_model, tmp_path)
    batch.trained_mask[0, 3] = False  # one token is gated
    parts = [part for each in rounds(batch, 1, 2) for part in each]
    assert len(parts) == 4
    learnt = [learner.learn(part) for part in parts]
    loss, stats = sum(loss for loss, _ in learnt), combine([stats for _, stats in learnt])
    got = gradients(learner)
    alone = make_learner(tiny_model, tmp_path)
    wanted, all_stats = alone.backward(batch, never)
    assert loss == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(got, gradients(alone), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(stats.sums, all_stats.sums, rtol=1e-5, atol=1e-6)  # float32 underneath
    assert stats.sums[:, 1].sum() == 1


def test_learning_raises_the_probability_of_what_was_rewarded(tiny_model, tmp_path):
    learner, batch = make_learner(tiny_model, tmp_path), sequences((4, 4))
    with torch.no_grad():
        fresh = score_tokens(learner.policy.compute, batch, Sampling()).logprobs
    batch.behaviour_logprobs.copy_(fresh)
    learner.backward(batch, never)
    learner.step()
    with torch.no_grad():
        after = score_tokens(learner.policy.compute, batch, Sampling()).logprobs
    change = (after - fresh).sum(dim=1)
    assert batch.advantages[:, -1].tolist() == [-0.5, 0.5]
    assert change[0] < 0 < change[1]


def test_the_divergence_holds_the_policy_at_its_reference(tiny_model, tmp_path):
    """Its gradient is zero where the policy is the reference, and leads back to it from elsewhere."""
    start = load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"))
    start.master.requires_grad_(False)
    kept = ObjectiveConfig(name="reinforce", kl=1.0, kl_estimator="k2")
    learner = make_learner(tiny_model, tmp_path, reference=start, objective=kept, learning_rate=1e-4)
    batch = sequences((4, 4))
    batch.advantages.zero_()
    learner.backward(batch, never)
    assert gradients(learner).abs().max() < 1e-6
    with torch.no_grad():
        for parameter in learner.policy.master.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    losses = []
    for _ in range(4):
        losses.append(learner.backward(batch, never)[0])
        learner.step()
    assert losses[0] > losses[-1] > 0


def test_or_at_its_teacher(tiny_model, tmp_path):
    """Whatever the start says: the reference is who scored the rollouts."""
    asked = ObjectiveConfig(name="reinforce", kl=1.0, kl_cap=0.0, kl_estimator="k2", kl_reference="teacher")
    learner = make_learner(tiny_model, tmp_path, objective=asked)
    batch = sequences((4, 4))
    batch.advantages.zero_()
    with torch.no_grad():
        now = score_tokens(learner.policy.compute, batch, Sampling()).logprobs
    scored = [dataclasses.replace(batch, teacher_logprobs=teacher) for teacher in (now, now + 0.5)]
    found = [learner.backward(each, never)[0] for each in scored]
    assert found == [pytest.approx(0.0, abs=1e-9), pytest.approx(0.125, rel=1e-4)]
    with pytest.raises(ValueError, match="needs a reference: this batch has none"):
        learner.backward(batch, never)


def test_the_entropy_bonus_raises_the_entropy(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, objective=ObjectiveConfig(entropy=1.0))
    batch = sequences((4, 4))
    batch.advantages.zero_()
    found = []
    for _ in range(3):
        found.append(learner.backward(batch, never)[1].values()["entropy"])
        learner.step()
    assert found[0] < found[1] < found[2]


def test_a_stop_gives_the_step_up_before_anything_has_changed(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, micro_batch=1)
    before = [p.clone() for p in learner.policy.master.parameters()]
    answers = iter([False, True])
    with pytest.raises(Stopped):
        learner.backward(sequences(), lambda: next(answers))
    assert all(p.grad is None for p in learner.policy.master.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.master.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model, tmp_path):
    """Neither weights nor optimizer nor learning rate; the next one is taken as if it had not been."""
    learners = [make_learner(tiny_model, tmp_path, warmup_steps=4) for _ in range(2)]
    poisoned = sequences()
    poisoned.advantages[0] = float("nan")
    learner = learners[0]
    learner.backward(poisoned, never)
    before = [p.clone() for p in learner.policy.master.parameters()]
    assert math.isnan(learner.step())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.master.parameters(), strict=True))
    assert not learner.optimizer.state
    for each in learners:
        each.backward(sequences(), never)
        assert math.isfinite(each.step())
    ours, theirs = (each.policy.master.parameters() for each in learners)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert [each.optimizer.param_groups[0]["lr"] for each in learners] == [pytest.approx(0.5e-3)] * 2


@pytest.mark.parametrize("there", [False, True])
def test_weights_that_a_folder_does_not_have_are_not_made_up(tmp_path, tiny_model, there):
    shutil.copytree(tiny_model, tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    whole = tensors.pop(name)
    save_file(tensors | ({name: whole[:3].clone()} if there else {}), file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"its weights do not have {name}, or in another shape"):
        load_policy(tmp_path / "model", bfloat16=False, device=torch.device("cpu"))
