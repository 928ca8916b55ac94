"""Several updates a batch: dealt out whole, bounded by the weights before the first, as the formulas say."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from accelerate import Accelerator
from reference_objectives import REFERENCES
from rollout_samples import make_config
from test_trainer_loss import gradients, never, sequences

from inflight.config import ConfigError, ObjectiveConfig, Sampling, TrainerConfig
from inflight.trainer import updates
from inflight.trainer.batch import Batch, scales
from inflight.trainer.learner import Learner, Stopped
from inflight.trainer.lines import learning
from inflight.trainer.loss import make_loss
from inflight.trainer.policy import load_policy
from inflight.trainer.skips import LearnError, Skips
from inflight.trainer.split import mini_batches

LENGTHS = (5, 2, 7, 4, 6, 3)


@dataclasses.dataclass
class Seen:
    """What an update was computed from, and what it came to."""

    part: Batch
    weights: dict[str, torch.Tensor]
    loss: float
    gradient: torch.Tensor


class Recorder(Learner):
    """Keeps what it sees; the gradient is read before the optimizer clips and takes it."""

    def backward(self, batch, stop):
        result = super().backward(batch, stop)
        weights = {name: tensor.clone() for name, tensor in self.policy.master.state_dict().items()}
        self.seen.append(Seen(batch, weights, result[0], gradients(self).clone()))
        return result


def make_learner(tiny_model, tmp_path, *, bfloat16=False, **trainer) -> Recorder:
    settings = {"micro_batch": 2, "learning_rate": 1e-3, "updates_per_batch": 2, "epochs_per_batch": 2}
    config = dataclasses.replace(make_config(tmp_path, step=4), trainer=TrainerConfig(**(settings | trainer)))
    policy = load_policy(tiny_model, bfloat16=bfloat16, device=torch.device("cpu"))
    learner = Recorder(policy, config, Accelerator(cpu=True))
    learner.seen = []
    return learner


def logprobs_of(policy, batch):
    """[B, L] with gradient."""
    return policy.score(batch, Sampling()).logprobs


def stale_batch(learner, spread=0.4):
    """Sequences that were sampled under other weights: the policy's log-probabilities and noise."""
    batch = sequences(LENGTHS)
    noise = torch.randn(batch.behaviour_logprobs.shape, generator=torch.Generator().manual_seed(5)) * spread
    batch.behaviour_logprobs.copy_((learner.score(batch) + noise).masked_fill(~batch.completion_mask, 0))
    batch.lags.copy_(torch.arange(batch.lags.shape[1]).expand_as(batch.lags) % 4)
    return batch


def rows_of(part, whole):
    """Which sequences of the whole batch those of a part are: no two were recorded alike."""
    width = part.input_ids.shape[1]
    same = (part.behaviour_logprobs[:, None] == whole.behaviour_logprobs[None, :, :width]).all(dim=2)
    assert (same.sum(dim=1) == 1).all()
    return same.int().argmax(dim=1)


def by_hand(part, now, prox, reference):
    """The part's loss and its gradient by each log-probability, from the formula, in float64; trained tokens that a
    bound has silenced."""
    value, slope, silenced = 0.0, torch.zeros_like(now), 0
    for row, mask in enumerate(part.trained_mask):
        own = [tensor[row][mask].tolist() for tensor in (now, part.behaviour_logprobs, prox, part.advantages)]
        total, by_token = reference(*own, part.lags[row][mask].tolist())
        value, slope[row][mask] = value + total, torch.tensor(by_token, dtype=now.dtype)
        silenced += sum(each == 0 for each in by_token)
    tokens = int(part.trained_mask.sum())
    return value / tokens, slope / tokens, silenced


@pytest.fixture(scope="module")
def policy(tiny_model):
    """Computes with whatever weights it is given."""
    return load_policy(tiny_model, bfloat16=False, device=torch.device("cpu"))


@pytest.mark.parametrize("case", sorted(REFERENCES))
def test_every_update_of_a_batch_is_that_of_the_formula(tiny_model, tmp_path, policy, case):
    """What a learner has really computed, in float32, against plain Python in float64: from the second update on the
    proximal policy is another one than the trained one, and the clips around it bind."""
    name, options, reference = REFERENCES[case]
    asked = ObjectiveConfig(name=name, options=options, normalise="token")
    learner = make_learner(tiny_model, tmp_path, objective=asked, learning_rate=3e-4)
    batch = stale_batch(learner, spread=0.3)
    batch.advantages.copy_(torch.randn(batch.advantages.shape, generator=torch.Generator().manual_seed(6)))
    policy.master.load_state_dict(learner.policy.master.state_dict())
    start = logprobs_of(policy, batch).detach()
    done = updates.train(learner, batch, never)
    assert len(done) == len(learner.seen) == 4
    silenced, drifts, sizes = [], [], []
    for update, seen in zip(done, learner.seen, strict=True):
        part, prox = seen.part, start[rows_of(seen.part, batch)][:, : seen.part.input_ids.shape[1]]
        torch.testing.assert_close(part.proximal_logprobs, prox * part.completion_mask, rtol=0, atol=1e-5)
        policy.master.load_state_dict(seen.weights)
        policy.master.zero_grad()
        now = logprobs_of(policy, part)
        value, slope, zeros = by_hand(part, now.detach().double(), prox.double(), reference)
        (now * slope.float()).sum().backward()
        wanted = torch.cat([each.grad.flatten() for each in policy.master.parameters()])
        assert seen.loss == update.loss == pytest.approx(value, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(seen.gradient, wanted, rtol=1e-3, atol=1e-5)
        sizes.append(float(wanted.abs().max()))
        silenced.append(zeros)
        drifts.append(update.stats.whole()["drift"])
    assert drifts[0] == pytest.approx(0, abs=1e-6)
    assert min(drifts[1:]) > 0.01
    assert sorted(sizes)[-2] > 1e-3, "what is zero everywhere compares nothing"
    if case in CLIPS_THE_UPDATE:
        assert sum(silenced[1:]) > silenced[0], "no bound of the update has ever silenced a token"


CLIPS_THE_UPDATE = ("decoupled_ppo", "tis", "tis_sequence", "tis geometric", "masked_is", "icepop", "sequence_mask")


def test_an_epoch_uses_every_sequence_once_and_computes_the_weights_of_each_part():
    batch = sequences(LENGTHS)
    for count in (1, 2, 4, 6, 9):
        for normalise in ("token", "sequence", "constant"):
            parts = mini_batches(batch, count, normalise, 16)
            assert len(parts) == min(count, len(LENGTHS))
            sizes = [len(part.input_ids) for part in parts]
            assert max(sizes) - min(sizes) <= 1
            lengths = [part.trained_mask.sum(dim=1).tolist() for part in parts]
            assert sorted(each for own in lengths for each in own) == sorted(LENGTHS)
            for part, own in zip(parts, lengths, strict=True):
                assert torch.equal(part.scales, scales(own, normalise, 16))


def test_epochs_are_partitioned_differently_and_resume_with_the_random_state(tiny_model, tmp_path):
    learner, found = make_learner(tiny_model, tmp_path, updates_per_batch=3), []
    batch = stale_batch(learner)
    for _ in range(2):
        torch.manual_seed(3)
        learner.seen = []
        updates.train(learner, batch, never)
        found.append([rows_of(seen.part, batch).tolist() for seen in learner.seen])
    assert found[0] == found[1]
    assert found[0][:3] != found[0][3:]


def test_one_update_a_batch_scores_nothing_twice(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, updates_per_batch=1, epochs_per_batch=1)
    updates.train(learner, stale_batch(learner), never)
    assert [seen.part.proximal_logprobs for seen in learner.seen] == [None]


def test_the_learning_rate_moves_with_the_version_and_not_with_the_update(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, warmup_steps=4)
    for version in range(3):
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * (version + 1) / 4)
        updates.train(learner, stale_batch(learner), never)


def test_figures_by_lag_are_those_of_the_weights_before_the_first_update(tiny_model, tmp_path):
    """Lag 0 stays the noise floor, and each token is counted once, however many epochs meet it."""
    learner = make_learner(tiny_model, tmp_path, learning_rate=1e-2, epochs_per_batch=3)
    batch = stale_batch(learner, spread=0.0)
    line = learning(updates.train(learner, batch, never), 3, batch)
    assert (line["updates"], line["tokens_trained"], line["tokens_masked"]) == (6, sum(LENGTHS), 0)
    assert line["log_ratio_max"] < 1e-5
    assert [row["log_ratio_max"] < 1e-5 for row in line["by_lag"].values()] == [True] * 4
    assert [row["drift"] > 1e-3 for row in line["by_update"]] == [False, *[True] * 5]
    assert line["loss"] == pytest.approx(sum(row["loss"] for row in line["by_update"]) / 6)


def test_a_rule_on_log_ratios_says_the_same_at_every_update(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, learning_rate=1e-2, updates_per_batch=1, epochs_per_batch=3)
    rules = dataclasses.replace(learner._config.gate, ratio_rules=[{"name": "token_ratio", "low": 0.8, "high": 1.25}])
    learner._loss = make_loss(dataclasses.replace(learner._config, gate=rules))
    counts = [update.stats.gated_by["token_ratio"] for update in updates.train(learner, stale_batch(learner), never)]
    assert counts == [counts[0]] * 3
    assert 0 < counts[0] < sum(LENGTHS)


def test_a_stop_is_heeded_before_the_first_update_and_not_between_two(tiny_model, tmp_path):
    """A version is of a whole batch; what a checkpoint then holds is one."""
    learner = make_learner(tiny_model, tmp_path)
    with pytest.raises(Stopped):
        updates.train(learner, stale_batch(learner), lambda: True)
    assert learner.seen == []
    done = updates.train(learner, stale_batch(learner), lambda: bool(learner.seen))
    assert len(done) == 4


@pytest.mark.parametrize("poisoned", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
def test_of_several_updates_those_whose_gradient_is_not_finite_are_skipped(tiny_model, tmp_path, poisoned):
    """The learning rate moves on once if any was taken, though the last was not."""
    learner = make_learner(tiny_model, tmp_path, warmup_steps=4)
    batch, rate = stale_batch(learner), learner.optimizer.param_groups[0]["lr"]
    backward = learner.backward

    def harmed(part, stop):
        if len(learner.seen) in poisoned:
            part.advantages.fill_(float("nan"))
        return backward(part, stop)

    learner.backward = harmed
    done = updates.train(learner, batch, never)
    assert [index for index, each in enumerate(done) if not each.taken] == sorted(poisoned)
    assert all(torch.isfinite(each).all() for each in learner.policy.master.parameters())
    parameter = next(iter(learner.policy.master.parameters()))
    taken = 4 - len(poisoned)
    assert learner.optimizer.state[parameter].get("step", 0) == taken
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(rate * (2 if taken else 1))


def test_a_line_of_a_step_tells_of_the_updates_that_were_taken(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path)
    batch = stale_batch(learner)
    done = updates.train(learner, batch, never)
    skipped = dataclasses.replace(done[1], grad_norm=float("nan"), loss=float("nan"))
    line = learning([done[0], skipped, *done[2:]], 1, batch)
    assert (line["updates"], len(line["by_update"])) == (3, 4)
    assert math.isfinite(line["loss"])
    assert math.isfinite(line["grad_norm"])
    assert line["tokens_trained"] == sum(each.stats.tokens for each in (done[0], *done[2:]))


def test_too_many_skipped_in_a_row_end_the_run(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path)
    good = updates.train(learner, stale_batch(learner), never)[0]
    bad = dataclasses.replace(good, grad_norm=float("inf"))
    skips = Skips(3)
    assert skips.note([good]) == ""
    assert skips.note([bad, bad, good, bad]) == "the gradient's norm is inf: 3 of 4 updates of the batch skipped"
    skips.require()
    assert skips.told() == {"updates_skipped": 3}
    assert skips.told() == {"updates_skipped": 0}
    skips.note([bad])
    skips.require()
    skips.note([bad])
    with pytest.raises(LearnError, match=r"^the gradient's norm is inf: 3 updates in a row were skipped"):
        skips.require()


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"updates_per_batch": 0}, "trainer.updates_per_batch=0 is not allowed: 1 or more"),
        ({"epochs_per_batch": 0}, "trainer.epochs_per_batch=0 is not allowed: 1 or more"),
        ({"updates_per_batch": 9}, "trainer.updates_per_batch=9 is not allowed: a step has 8 sequences"),
        ({"updates_per_batch": 3, "processes": 3}, "each of 3 trainer processes needs one for each update"),
    ],
)
def test_more_updates_than_there_are_sequences_are_refused(tmp_path, trainer, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(make_config(tmp_path, step=4), trainer=TrainerConfig(groups_per_step=4, **trainer))
