"""Every objective against its formula, written again in plain Python (reference_objectives.py), and its invariants."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from batches import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_objectives import REFERENCES
from rollout_samples import make_config

from inflight.config import ConfigError, ObjectiveConfig, TrainerConfig
from inflight.named import find, with_options
from inflight.trainer.batch import Batch
from inflight.trainer.logprobs import Scores
from inflight.trainer.loss import Loss, kl, make_loss, weighted_kl
from inflight.trainer.objectives import OBJECTIVES
from inflight.trainer.objectives.base import Terms, TokenLoss, prefers, ratio
from inflight.trainer.ratio_rules import ratio_rules_of

NORMALISATIONS = ("token", "sequence", "constant")
MAX_TOKENS = 11


def objective(case):
    name, options, _ = REFERENCES[case]
    return with_options(find(name, OBJECTIVES, "test"), options, "test")


@dataclasses.dataclass
class Problem:
    batch: Batch
    now: torch.Tensor
    entropy: torch.Tensor
    reference: torch.Tensor


def problem(seed, *, normalise="token", spread=0.7, rows=6, width=9, fresh=False, dtype=torch.float64) -> Problem:
    """Random sequences with masks, lags, per-token advantages, and a proximal policy between then and now."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(rows, width, generator=draw, dtype=torch.float64) * scale

    then = -normal(1.0).abs() - 0.1
    lags = torch.zeros(rows, width, dtype=torch.int64) if fresh else torch.randint(0, 6, (rows, width), generator=draw)
    now = then if fresh else then + normal(spread) * (lags > 0)
    proximal = then if fresh else then + (now - then) * torch.rand(rows, width, generator=draw, dtype=torch.float64)
    trained = torch.rand(rows, width, generator=draw) < 0.7
    trained[:, 0] = False
    trained[0, 1] = True
    batch = make_batch(
        then,
        normal(1.0),
        trained=trained,
        lags=lags,
        normalise=normalise,
        max_tokens=MAX_TOKENS,
        proximal_logprobs=proximal,
    )
    made = Problem(batch, now, normal(1.0).abs(), then + normal(0.5))
    if dtype is torch.float64:
        return made
    cast = batch._map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return Problem(cast, now.to(dtype), made.entropy.to(dtype), made.reference.to(dtype))


def run(loss, given: Problem):
    """The loss and its gradient by the log-probabilities and by the entropy."""
    now, entropy = given.now.clone().requires_grad_(), given.entropy.clone().requires_grad_()
    value, _ = loss(Scores(now, entropy), given.batch, given.reference)
    value.backward()
    return float(value.detach()), now.grad, torch.zeros_like(now) if entropy.grad is None else entropy.grad


def expected(case, given: Problem, normalise):
    """The same from the formulas: plain Python over the trained tokens of each sequence."""
    batch, reference = given.batch, REFERENCES[case][2]
    gradient = torch.zeros_like(given.now, dtype=torch.float64)
    total, tokens = 0.0, int(batch.trained_mask.sum())
    for row, mask in enumerate(batch.trained_mask):

        def of(tensor, row=row, mask=mask):
            return tensor[row][mask].tolist()

        own = int(mask.sum())
        if normalise == "token":
            scale = 1 / tokens
        elif normalise == "sequence":
            scale = 1 / (len(batch.trained_mask) * own) if own else 0.0
        else:
            scale = 1 / (len(batch.trained_mask) * MAX_TOKENS)
        value, slope = reference(
            of(given.now),
            of(batch.behaviour_logprobs),
            of(batch.proximal_logprobs),
            of(batch.advantages),
            of(batch.lags),
        )
        total += scale * value
        gradient[row][mask] = torch.tensor(slope, dtype=torch.float64) * scale
    return total, gradient


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("case", REFERENCES)
def test_value_and_gradient_are_those_of_the_formula(case, normalise):
    moved = 0
    for seed in range(20):
        given = problem(seed, normalise=normalise)
        value, gradient, _ = run(Loss(objective(case), normalise), given)
        wanted, slope = expected(case, given, normalise)
        assert value == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-6)
        moved += int((slope != 0).sum())
    assert moved > 20, "a reference that is zero everywhere compares nothing"


@pytest.mark.parametrize("case", REFERENCES)
def test_in_float32_too(case):
    for seed in range(5):
        given = problem(seed, dtype=torch.float32)
        value, gradient, _ = run(Loss(objective(case), "token"), given)
        wanted, slope = expected(case, problem(seed), "token")
        assert value == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", REFERENCES)
def test_without_a_proximal_policy_it_is_the_one_that_is_trained(case):
    """What every step of a run is, since it takes one update a batch: a constant with the value of what is trained."""
    for seed in range(10):
        given = problem(seed)
        wanted, slope = expected(case, _with_proximal(given, given.now), "token")
        value, gradient, _ = run(Loss(objective(case), "token"), _with_proximal(given, None))
        assert value == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-6)
        assert slope.any() or case == "geometric_mask", "bounds that no sequence meets"


def _with_proximal(given: Problem, logprobs):
    return dataclasses.replace(given, batch=dataclasses.replace(given.batch, proximal_logprobs=logprobs))


def test_every_built_in_objective_has_a_reference():
    assert {name for name, _, _ in REFERENCES.values()} == set(OBJECTIVES)


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("case", REFERENCES)
def test_micro_batches_of_any_size_add_up(case, normalise):
    given = problem(3, normalise=normalise)
    loss = Loss(objective(case), normalise, kl=0.1, entropy=0.01)
    whole, gradient, by_entropy = run(loss, given)
    for size in (1, 2, 5):
        value, parts = 0.0, torch.zeros_like(gradient)
        entropies = torch.zeros_like(gradient)
        for rows in torch.arange(len(given.now)).split(size):
            part = Problem(
                given.batch._map(lambda t, rows=rows: t[rows]),
                given.now[rows],
                given.entropy[rows],
                given.reference[rows],
            )
            share, parts[rows], entropies[rows] = run(loss, part)
            value += share
        assert value == pytest.approx(whole, rel=1e-9)
        torch.testing.assert_close(parts, gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(entropies, by_entropy, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), case=st.sampled_from(sorted(REFERENCES)), normalise=st.sampled_from(NORMALISATIONS))
def test_order_and_padding_change_nothing(seed, case, normalise):
    given, loss = problem(seed, normalise=normalise), Loss(objective(case), normalise)
    value, gradient, _ = run(loss, given)
    order = torch.randperm(len(given.now), generator=torch.Generator().manual_seed(seed))

    def change(tensor):  # shuffled, and three columns of padding on the right
        tensor = tensor[order]
        if tensor.ndim == 1:
            return tensor
        return torch.cat([tensor, torch.zeros(len(tensor), 3, *tensor.shape[2:], dtype=tensor.dtype)], dim=1)

    changed = Problem(given.batch._map(change), change(given.now), change(given.entropy), change(given.reference))
    again, moved, _ = run(loss, changed)
    assert again == pytest.approx(value, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(moved[:, :-3], gradient[order], rtol=1e-9, atol=1e-12)
    assert not moved[:, -3:].any()


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), case=st.sampled_from(sorted(REFERENCES)))
def test_a_masked_token_has_exactly_no_gradient_whatever_stands_there(seed, case):
    given, loss = problem(seed), Loss(objective(case), "token", kl=0.1, entropy=0.01)
    value, gradient, by_entropy = run(loss, given)
    outside = ~given.batch.trained_mask
    given.now[outside] = float("-inf")
    given.batch.behaviour_logprobs[outside] = float("nan")
    given.batch.proximal_logprobs[outside] = float("nan")
    given.batch.advantages[outside] = 7.0
    given.reference[outside] = float("inf")
    given.entropy[outside] = float("nan")
    again, moved, entropies = run(loss, given)
    assert again == value
    assert torch.equal(moved, gradient)
    assert torch.equal(entropies, by_entropy)
    assert not moved[outside].any()
    assert not entropies[outside].any()


@pytest.mark.parametrize("case", REFERENCES)
def test_fresh_tokens_of_ratio_one_give_the_policy_gradient(case):
    """Where nothing is old, all of them are REINFORCE: the gradient by a log-probability is minus its advantage."""
    given = problem(11, fresh=True)
    _, gradient, _ = run(Loss(objective(case), "token"), given)
    mask, advantages = given.batch.trained_mask, given.batch.advantages
    wanted = -advantages
    if case == "gspo":  # its ratio is the sequence's: each token gets the mean of the sequence's advantages
        means = (advantages * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        wanted = -means.expand_as(advantages)
    wanted = (wanted * mask) / mask.sum()
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: -d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: -d),
        ("k3", lambda d: float(torch.tensor(d).exp()) - d - 1, lambda d: 1 - float(torch.tensor(d).exp())),
    ],
)
def test_kl_estimators(estimator, value, slope):
    for d in (-1.3, -0.2, 0.0, 0.4, 2.0):
        now = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
        got = kl(now, torch.tensor([[-1.0 + d]], dtype=torch.float64), estimator)
        got.sum().backward()
        assert float(got.detach()) == pytest.approx(value(d), abs=1e-6)
        assert float(now.grad) == pytest.approx(slope(d), abs=1e-6)


def categorical(drift, seed=0, size=50):
    """A policy's logits, its reference's log-probabilities, and who samples: the policy as it was, `drift` away."""
    draw = torch.Generator().manual_seed(seed)
    logits, toward, away = (torch.randn(size, generator=draw, dtype=torch.float64) for _ in range(3))
    policy = (2 * logits).requires_grad_()
    reference = (2 * logits + 0.7 * toward).log_softmax(0)
    return policy, reference, (2 * logits + drift * away).log_softmax(0)


@pytest.mark.parametrize("drift", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_weighted_divergence_is_the_divergence_for_any_behaviour_policy(estimator, drift):
    """Exact expectations over a vocabulary: value and gradient of KL(policy || reference), of tokens sampled by
    another policy, in which each token has its probability there."""
    policy, reference, sampler = categorical(drift)
    now = policy.log_softmax(0)
    true = (now.exp() * (now - reference)).sum()
    (wanted,) = torch.autograd.grad(true, policy, retain_graph=True)
    mask = torch.ones_like(now, dtype=torch.bool)[None]
    terms = Terms(now[None], sampler[None], None, torch.zeros_like(now)[None], mask, mask.long())
    got = (sampler.exp() * weighted_kl(terms, reference[None], estimator, 1e9)[0]).sum()
    (gradient,) = torch.autograd.grad(got, policy, retain_graph=True)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    if estimator != "k2":
        assert float(got) == pytest.approx(float(true), rel=1e-9)
    capped = weighted_kl(terms, reference[None], estimator, 1.5)[0]
    inside = (now - sampler).exp() <= 1.5
    assert torch.equal(capped[inside], weighted_kl(terms, reference[None], estimator, 1e9)[0][inside])


def test_without_weights_an_old_token_pulls_elsewhere():
    """What the weights are for: k3 unweighted has a gradient of another size and direction; k1's is none at all."""
    policy, reference, sampler = categorical(0.0)
    now = policy.log_softmax(0)
    (wanted,) = torch.autograd.grad((now.exp() * (now - reference)).sum(), policy, retain_graph=True)
    found = []
    for estimator in ("k1", "k3"):
        value = (sampler.exp() * kl(now, reference, estimator)).sum()
        found += torch.autograd.grad(value, policy, retain_graph=True)
    assert found[0].norm() < 1e-9
    assert (found[1] - wanted).norm() > 0.1 * wanted.norm()


def test_the_divergence_is_weighed_unless_it_is_asked_not_to(tmp_path):
    assert loss_of(tmp_path, kl=0.1).kl_cap == 2.0
    assert loss_of(tmp_path, kl=0.1, kl_cap=0.0).kl_cap == 0.0
    assert loss_of(tmp_path, kl=0.1, kl_estimator="k1").kl_estimator == "k1"
    with pytest.raises(ConfigError, match=r"objective\.kl_estimator='k1' is not allowed: k2, k3: without weights"):
        loss_of(tmp_path, kl=0.1, kl_estimator="k1", kl_cap=0.0)


def test_kl_and_entropy_are_added_per_token():
    given = problem(5)
    plain, plain_slope, _ = run(Loss(objective("ppo"), "token"), given)
    value, slope, by_entropy = run(Loss(objective("ppo"), "token", kl=0.3, kl_estimator="k3", entropy=0.05), given)
    mask = given.batch.trained_mask
    d = (given.reference - given.now)[mask]
    assert value - plain == pytest.approx(
        float(0.3 * (d.exp() - d - 1).mean() - 0.05 * given.entropy[mask].mean()), rel=1e-6
    )
    torch.testing.assert_close((slope - plain_slope)[mask], 0.3 * (1 - d.exp()) / mask.sum(), rtol=1e-5, atol=1e-8)
    assert by_entropy[mask].tolist() == pytest.approx([-0.05 / int(mask.sum())] * int(mask.sum()), rel=1e-6)


def test_a_divergence_without_a_reference_is_refused():
    given = problem(1)
    with pytest.raises(ValueError, match="needs a reference"):
        Loss(objective("ppo"), "token", kl=0.1)(Scores(given.now, given.entropy), given.batch)


# --- the seam ----------------------------------------------------------------------------------------------------


@prefers(normalise="sequence")
def my_objective(terms: Terms, *, power: float = 1.0) -> TokenLoss:
    """All that a user has to write: it stands in this one file."""
    return TokenLoss(-(ratio(terms.log_ratio) ** power) * terms.advantages, torch.zeros_like(terms.mask))


def no_loss(terms: Terms):
    return terms.logprobs


def loss_of_sequences(terms: Terms) -> TokenLoss:
    return TokenLoss(terms.logprobs.sum(dim=1, keepdim=True), terms.mask)


def loss_of_the_field(terms: Terms) -> TokenLoss:
    """A run has no proximal policy beside the one that it trains: `recomputed()` is the way to it."""
    return TokenLoss(-(terms.logprobs - terms.proximal).exp() * terms.advantages, terms.mask)


def keeps_sequences(log_ratio, mask):
    return log_ratio.sum(dim=1) < 1


def keeps_by_weight(log_ratio, mask):
    return log_ratio


def loss_of(tmp_path, **objective):
    trainer = TrainerConfig(objective=ObjectiveConfig(**objective))
    return make_loss(dataclasses.replace(make_config(tmp_path), trainer=trainer))


def test_a_users_objective_is_one_function(tmp_path):
    loss = loss_of(tmp_path, name="test_objectives:my_objective", options={"power": 2})
    assert loss.normalise == "sequence"
    given = problem(2)
    mask = given.batch.trained_mask
    squared = ((2 * (given.now - given.batch.behaviour_logprobs)).exp() * given.batch.advantages)[mask]
    assert run(loss, given)[0] == pytest.approx(-float(squared.sum() / mask.sum()), rel=1e-6)


BOUNDED = ["masked_is", "icepop", "sequence_mask", "geometric_mask"]
CLIPPED = [*BOUNDED, "ppo", "grpo", "dr_grpo", "dapo", "decoupled_ppo", "tis", "tis_sequence", "cispo", "gspo"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "best"}, "trainer.objective.name='best' is not known: reinforce, ppo"),
        ({"name": "test_objectives:absent"}, "can't be imported"),
        ({"name": "no_such_module:f"}, "can't be imported"),
        ({"name": "test_objectives:no_loss"}, "does not return a TokenLoss"),
        ({"name": "test_objectives:loss_of_sequences"}, "does not return a TokenLoss of the shape"),
        ({"name": "test_objectives:loss_of_the_field"}, "loss_of_the_field: unsupported operand"),
        (
            {"name": "ppo", "options": {"clip": 0.1}},
            r"objective\.options\.clip is not an option: did you mean clip_low\?$",
        ),
        ({"options": {"clip_low": "a"}}, "clip_low='a' is not allowed: it takes float"),
        ({"name": "tis", "options": {"level": "word"}}, "level='word' is not allowed: token, sequence, geometric"),
        ({"name": "decoupled_ppo", "options": {"proximal_by": "magic"}}, "recomputed, interpolated"),
    ],
)
def test_what_does_not_exist_is_named(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        loss_of(tmp_path, **settings)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        *[(name, {"clip_low": 1.5}, "clip_low=1.5, clip_high=.* is not allowed: 0 to 1, and 0") for name in CLIPPED],
        *[(name, {"clip_high": -0.1}, "clip_high=-0.1 is not allowed: 0 to 1, and 0 or above") for name in CLIPPED],
        *[
            (name, {"low": 3.0, "high": 2.0}, "low=3.0, high=2.0 is not allowed: 0 or above, and low")
            for name in BOUNDED
        ],
        *[(name, {"cap": 0.0}, "cap=0.0 is not allowed: above 0") for name in ("tis", "tis_sequence", "topr")],
        ("tis", {"cap": float("nan")}, "cap=nan is not allowed: above 0"),
        ("decoupled_ppo", {"cap": -1.0}, "cap=-1.0 is not allowed: 0 .none. or above"),
        ("sapo", {"temperature_positive": 0.0}, "temperature_positive=0.0 is not allowed: above 0"),
        ("sapo", {"temperature_negative": -1.0}, "temperature_negative=-1.0 is not allowed: above 0"),
    ],
)
def test_an_option_that_prevents_training_is_refused_before_the_start(tmp_path, name, options, words):
    with pytest.raises(ConfigError, match=f"trainer.objective {name}: .*{words}"):
        loss_of(tmp_path, name=name, options=options)


NOT_BY_TOKEN = {"grpo": "sequence", "gspo": "sequence", "sapo": "sequence", "dr_grpo": "constant"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_normalised_as_its_paper_does(tmp_path, name):
    assert loss_of(tmp_path, name=name).normalise == NOT_BY_TOKEN.get(name, "token")
    for asked in NORMALISATIONS:
        assert loss_of(tmp_path, name=name, normalise=asked).normalise == asked


# --- the gate's rules on log-ratios --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token_ratio", "sequence_ratio", "geometric_ratio"])
def test_ratio_rules_that_would_keep_nothing_are_refused(name):
    with pytest.raises(
        ConfigError, match=rf"gate.ratio_rules\[0\] {name}: low=2.0, high=1.5 is not allowed: 0 or above"
    ):
        ratio_rules_of([{"name": name, "low": 2.0, "high": 1.5}])


@pytest.mark.parametrize("name", ["token_ratio", "sequence_ratio", "geometric_ratio"])
def test_ratio_rules_mask_what_is_out_of_bounds(name):
    given = _with_proximal(problem(4), None)
    rules = ratio_rules_of([{"name": name, "low": 0.7, "high": 1.4}])
    now = given.now.clone().requires_grad_()
    loss, stats = Loss(objective("ppo"), "token", ratio_rules=rules)(Scores(now, given.entropy), given.batch)
    loss.backward()
    mask, keep = given.batch.trained_mask, torch.zeros_like(given.batch.trained_mask)
    for row in range(len(mask)):
        log_ratios = (given.now - given.batch.behaviour_logprobs)[row]
        own = log_ratios[mask[row]]
        judged = {"sequence_ratio": own.sum(), "geometric_ratio": own.mean() if len(own) else own.sum()}.get(name)
        for column in range(mask.shape[1]):
            of = float((log_ratios[column] if judged is None else judged).exp())
            keep[row, column] = mask[row, column] and 0.7 <= of <= 1.4
    assert 0 < keep.sum() < mask.sum()
    assert stats.gated_by == {name: int(mask.sum() - keep.sum())}
    assert stats.tokens == int(keep.sum())
    assert not now.grad[~keep].any()
    _, gradient, _ = run(Loss(objective("ppo"), "token"), given)
    torch.testing.assert_close(now.grad[keep], gradient[keep], msg="what is kept is worth what it was")


def test_a_ratio_rule_that_stands_there_twice_is_counted_twice():
    given = _with_proximal(problem(4), None)
    mask, ratios = given.batch.trained_mask, (given.now - given.batch.behaviour_logprobs).exp()
    rules = ratio_rules_of([{"name": "token_ratio", "high": 2.0}, {"name": "token_ratio", "high": 1.2}])
    _, stats = Loss(objective("ppo"), "token", ratio_rules=rules)(Scores(given.now, given.entropy), given.batch)
    assert (ratios[mask] > 2.0).any()
    assert stats.gated_by == {"token_ratio": int((ratios[mask] > 1.2).sum())}


@pytest.mark.parametrize(
    ("name", "words"),
    [("keeps_sequences", "a bool for each"), ("keeps_by_weight", "a bool for each"), ("run", "no attribute")],
)
def test_ratio_rules_that_do_not_work_are_named(name, words):
    with pytest.raises(ConfigError, match=rf"gate.ratio_rules\[0\] test_objectives:{name}.*{words}"):
        ratio_rules_of([{"name": f"test_objectives:{name}"}])


def test_ratio_rules_that_do_not_exist_are_named():
    with pytest.raises(ConfigError, match=r"gate.ratio_rules\[0\].name='x' is not known: token_ratio"):
        ratio_rules_of([{"name": "x"}])
