"""Objectives against those of trl (`GRPOTrainer._compute_loss`), on random batches: value and gradient.

trl divides within the call; our scales say the same. Its proximal policy is `old_per_token_logps`, its weight against
the sampling policy `importance_sampling_ratio`.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from test_objectives import MAX_TOKENS, Problem, problem, run
from test_trainer_updates import logprobs_of, make_learner, stale_batch

from inflight.config import ObjectiveConfig
from inflight.named import find
from inflight.trainer import updates
from inflight.trainer.loss import Loss
from inflight.trainer.objectives import OBJECTIVES

pytestmark = pytest.mark.slow


def theirs(
    given: Problem,
    loss_type,
    *,
    old,
    level="token",
    low=0.2,
    high=0.2,
    weight=None,
    beta=0.0,
    entropy=0.0,
    parts=1,
    limit=MAX_TOKENS,
    weigh_kl=False,
):
    """trl's loss and its gradient by the log-probabilities and by the entropy, summed over `parts` micro-batches."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    now, entropies = given.now.clone().requires_grad_(), given.entropy.clone().requires_grad_()
    mask = given.batch.trained_mask.long()
    trainer = MagicMock(  # what it logs is of no interest
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        loss_type=loss_type,
        use_vllm=weight is not None,
        vllm_importance_sampling_correction=weight is not None,
        current_gradient_accumulation_steps=parts,
        max_completion_length=limit,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=weigh_kl,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=parts,
        ),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=False, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor
        ),
        _entropy_bonus_enabled=entropy > 0,
        entropy_coef=entropy,
        use_adaptive_entropy=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )
    total = 0.0
    for rows in torch.arange(len(now)).chunk(parts):
        trainer._get_per_token_logps_and_entropies = lambda *a, at=rows, **k: (now[at], entropies[at], None)
        inputs = {
            "prompt_ids": torch.zeros(len(rows), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(rows), 1),
            "completion_ids": given.batch.input_ids[rows],
            "completion_mask": mask[rows],
            "advantages": given.batch.advantages[rows],
            "old_per_token_logps": old[rows],
            "num_items_in_batch": mask.sum(),
            "ref_per_token_logps": given.reference[rows],
            "importance_sampling_ratio": None if weight is None else weight[rows],
        }
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        total += float(loss.detach())
    return total, now.grad, entropies.grad


def ours(given: Problem, name, normalise, beta=0.0, entropy=0.0):
    return run(Loss(find(name, OBJECTIVES, "test"), normalise, kl=beta, entropy=entropy), given)


def truncated(given: Problem, *, cap=None, masked=None, sequence=False):
    """trl's four modes of vllm_importance_sampling_mode, as it computes the ratio when it scores its completions."""
    log = (given.batch.proximal_logprobs - given.batch.behaviour_logprobs) * given.batch.trained_mask
    ratio = (log.sum(dim=1, keepdim=True) if sequence else log).exp()
    if cap is not None:
        return ratio.clamp(max=cap)
    return ratio.masked_fill((ratio < masked[0]) | (ratio > masked[1]), 0.0)


CASES = {
    "grpo": (("grpo", "sequence"), lambda g: {"loss_type": "grpo"}),
    "dr_grpo": (("dr_grpo", "constant"), lambda g: {"loss_type": "dr_grpo"}),
    "dapo": (("dapo", "token"), lambda g: {"loss_type": "dapo", "high": 0.28}),
    "ppo": (("ppo", "token"), lambda g: {"loss_type": "bnpo"}),
    "gspo": (("gspo", "sequence"), lambda g: {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}),
    "cispo": (("cispo", "token"), lambda g: {"loss_type": "cispo", "high": 5.0}),
    "sapo": (("sapo", "sequence"), lambda g: {"loss_type": "sapo"}),
    "tis": (("tis", "token"), lambda g: {"loss_type": "dapo", "weight": truncated(g, cap=2.0)}),
    "tis_sequence": (
        ("tis_sequence", "token"),
        lambda g: {"loss_type": "dapo", "weight": truncated(g, cap=2.0, sequence=True)},
    ),
    "decoupled_ppo": (("decoupled_ppo", "token"), lambda g: {"loss_type": "dapo", "weight": truncated(g, cap=1e9)}),
    "masked_is": (("masked_is", "token"), lambda g: {"loss_type": "dapo", "weight": truncated(g, masked=(0.0, 2.0))}),
    "icepop": (("icepop", "token"), lambda g: {"loss_type": "dapo", "weight": truncated(g, masked=(0.5, 5.0))}),
    "sequence_mask": (
        ("sequence_mask", "token"),
        lambda g: {"loss_type": "dapo", "weight": truncated(g, masked=(0.0, 2.0), sequence=True)},
    ),
}
SEQUENCE_RATIO = ("gspo",)
OF_ITS_OWN_TOKENS = ("ppo",)
"""trl divides each micro-batch by its own tokens there, so that the sum depends on the cut."""


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "parts"), [(name, parts) for name in CASES for parts in ((1,) if name in OF_ITS_OWN_TOKENS else (1, 3))]
)
def test_equal_to_trl(name, parts, beta):
    (objective, normalise), arguments = CASES[name]
    for seed in range(10):
        given = problem(seed, normalise=normalise)
        if name in SEQUENCE_RATIO:  # trl takes one advantage a sequence there
            given.batch.advantages[:] = given.batch.advantages[:, 1:2]
        options = arguments(given)
        old = given.batch.proximal_logprobs if "weight" in options else given.batch.behaviour_logprobs
        value, gradient, _ = ours(given, objective, normalise, beta)
        wanted, slope, _ = theirs(given, old=old, beta=beta, parts=parts, **options)
        assert value == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-5)
        assert slope.abs().max() > 1e-3


def test_the_entropy_bonus_is_trls():
    """As it is where all tokens of a step weigh the same: trl's is a mean over them whatever the loss."""
    for seed in range(10):
        given = problem(seed)
        value, gradient, by_entropy = ours(given, "ppo", "token", entropy=0.05)
        wanted, slope, by_theirs = theirs(given, "bnpo", old=given.batch.behaviour_logprobs, entropy=0.05)
        assert value == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_entropy, by_theirs, rtol=1e-5, atol=1e-7)
        assert by_theirs.abs().max() > 1e-4


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*SEQUENCE_RATIO, *OF_ITS_OWN_TOKENS)])
def test_the_updates_of_a_batch_are_trls(tiny_model, tmp_path, name):
    """What a learner has really computed in four updates of one batch, with the proximal policy that it has scored."""
    (objective, normalise), arguments = CASES[name]
    asked = ObjectiveConfig(name=objective, normalise=normalise)
    learner = make_learner(tiny_model, tmp_path, objective=asked, learning_rate=3e-4)
    batch, policy = stale_batch(learner, spread=0.3), make_learner(tiny_model, tmp_path).policy
    updates.train(learner, batch, lambda: False)
    limit = learner._config.rollout.max_tokens
    for seen in learner.seen:
        policy.master.load_state_dict(seen.weights)
        now = logprobs_of(policy, seen.part).detach()
        given = Problem(seen.part, now, torch.zeros_like(now), torch.zeros_like(now))
        options = arguments(given)
        old = seen.part.proximal_logprobs if "weight" in options else seen.part.behaviour_logprobs
        wanted, slope, _ = theirs(given, old=old, limit=limit, **options)
        _, gradient, _ = ours(given, objective, normalise)
        assert seen.loss == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-6)


def test_the_weighted_divergence_is_trls():
    """`use_bias_correction_kl`: the ratio, with its gradient, times k3."""
    for seed in range(10):
        given = problem(seed)
        loss = Loss(find("ppo", OBJECTIVES, "test"), "token", kl=0.1, kl_cap=1e9)
        value, gradient, _ = run(loss, given)
        wanted, slope, _ = theirs(given, "bnpo", old=given.batch.behaviour_logprobs, beta=0.1, weigh_kl=True)
        assert value == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-5)
