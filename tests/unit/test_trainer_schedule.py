"""Learning rates by name, and what AdamW does with its settings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from inflight.config import ConfigError, RunConfig, TaskConfig, TrainerConfig
from inflight.config.trainer import NEED_A_METRIC, SCHEDULES, ScheduleConfig
from inflight.launcher import preflight
from inflight.launcher.compose import compose
from inflight.trainer.__main__ import _require_named
from inflight.trainer.optimizer import make_optimizer, make_schedule
from inflight.trainer.schedule import rate_factor

STEPS, RATE = 12, 3e-4
NEEDED = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "cosine_with_restarts": {"num_cycles": 2},
}


def settings(name: str = "constant", warmup_steps: int = 0, **values) -> TrainerConfig:
    options = values.pop("options", NEEDED.get(name, {}))
    schedule = ScheduleConfig(name=name, options=options)
    return TrainerConfig(steps=STEPS, learning_rate=RATE, warmup_steps=warmup_steps, schedule=schedule, **values)


def rates_of_transformers(name: str, warmup_steps: int, steps: int) -> list[float]:
    """Step by step, as its own trainer takes them."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = get_scheduler(
        name, optimizer, warmup_steps, steps, None if name.startswith("constant") else NEEDED.get(name, {})
    )
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_transformers(name):
    factor = rate_factor(settings(name))
    assert [RATE * factor(step) for step in range(STEPS)] == pytest.approx(rates_of_transformers(name, 0, STEPS))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_is_counted_from_one_so_that_every_step_changes_something(name):
    factor = rate_factor(settings(name, warmup_steps=4))
    named = "constant_with_warmup" if name == "constant" else name
    expected = rates_of_transformers(named, 4, STEPS + 1)[1:]
    assert [RATE * factor(step) for step in range(STEPS)] == pytest.approx(expected)
    assert all(factor(step) > 0 for step in range(STEPS))
    if name != "cosine_warmup_with_min_lr":  # which rises from an option of its own
        assert [factor(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("name", ["constant", "cosine", "warmup_stable_decay"])
def test_a_run_that_is_resumed_has_the_rates_that_it_would_have_had(name):
    def rates(step: int) -> list[float]:
        optimizer = make_optimizer(nn.Linear(2, 2), settings(name, 3))
        schedule = make_schedule(optimizer, settings(name, 3), step)
        found = []
        for _ in range(step, STEPS):
            found.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
        return found

    assert rates(7) == rates(0)[7:]
    assert len({rate for pair in rates(0) for rate in pair}) == 3 if name == "constant" else True


def test_names_are_those_of_transformers_whose_rate_follows_from_the_step():
    assert {*SCHEDULES, *NEED_A_METRIC} == {each.value for each in SchedulerType}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cosine", {"cycles": 2}, r"trainer\.schedule\.options\.cycles=2 .*: options of cosine: num_cycles"),
        ("constant", {"num_cycles": 2}, "options of constant: none"),
        ("cosine_with_min_lr", {}, r"trainer\.schedule\.name='cosine_with_min_lr' can't be used: One of min_lr or"),
        ("warmup_stable_decay", {}, "can't be used: .*num_decay_steps"),
        ("cosine", {"num_cycles": "two"}, "can't be used"),
        ("polynomial", {"lr_end": 1.0}, "can't be used"),
        ("inverse_sqrt", {"timescale": float("inf")}, "the learning rate of step .* would be nan"),
    ],
)
def test_a_schedule_that_can_not_be_used_is_one_line(name, options, says):
    with pytest.raises(ConfigError, match=says) as error:
        _require_named(
            RunConfig(model=None, task=TaskConfig("addition"), run_dir="run", trainer=settings(name, options=options))
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*NEED_A_METRIC, "cosin"])
def test_a_schedule_that_no_run_can_have_is_refused(name):
    with pytest.raises(ConfigError, match=rf"trainer\.schedule\.name='{name}' is not allowed: constant, "):
        compose("tiny", [f"trainer.schedule.name={name}"])


@pytest.mark.parametrize("override", ["trainer.schedule.name=cosine", "+trainer.schedule.options.num_cycles=2"])
def test_the_launcher_has_a_schedule_looked_at_before_a_run_begins(monkeypatch, override):
    looked = []
    monkeypatch.setattr(preflight, "_look", lambda *asked: looked.append(asked) or preflight._Looked(2, ["no"], None))
    with pytest.raises(ConfigError, match="no"):
        preflight._require_named(compose("tiny", [override]))
    preflight._require_named(compose("tiny", ["trainer.warmup_steps=3"]))
    assert len(looked) == 1


class Block(nn.Module):
    """A matrix, its bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.RMSNorm(3)


def test_norms_and_biases_do_not_decay():
    model = Block()
    nn.init.constant_(model.linear.bias, 2.0)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = make_optimizer(model, replace(settings(), learning_rate=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factor = {"linear.weight": 0.95, "linear.bias": 1.0, "norm.weight": 1.0}
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.detach(), factor[name] * before[name])


def test_betas_and_epsilon_are_what_adam_computes_with():
    model, gradients = nn.Linear(1, 1, bias=False), (0.3, -0.2, 0.1)
    value = model.weight.item()
    optimizer = make_optimizer(model, settings(adam_beta1=0.5, adam_beta2=0.75, adam_epsilon=1e-2))
    first = second = 0.0
    for step, gradient in enumerate(gradients, 1):
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        first, second = 0.5 * first + 0.5 * gradient, 0.75 * second + 0.25 * gradient**2
        value -= RATE * (first / (1 - 0.5**step)) / (math.sqrt(second / (1 - 0.75**step)) + 1e-2)
    assert model.weight.item() == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize(
    "values", [{"adam_beta1": 1.0}, {"adam_beta2": -0.1}, {"adam_beta2": float("nan")}, {"adam_epsilon": 0.0}]
)
def test_what_adam_can_not_compute_with_is_refused(values):
    with pytest.raises(ConfigError, match=r"trainer\.adam_.* is not allowed"):
        TrainerConfig(**values)
