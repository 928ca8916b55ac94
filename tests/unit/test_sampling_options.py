"""How a completion ends, and whether its request has a seed: what is asked of vLLM, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout_samples import make_config
from test_actor import play, quick  # noqa: F401 - fixtures

from inflight.completions import sampling
from inflight.config import ConfigError, GeneratorConfig, RolloutConfig
from inflight.generator.engine_args import CPU_WORKER, engine_values
from inflight.launcher.compose import compose


def test_only_what_is_set_is_asked_for():
    plain = sampling(RolloutConfig(), 17)
    assert not {"stop", "stop_token_ids", "ignore_eos", "seed"} & plain.keys()
    given = sampling(RolloutConfig(stop=["x"], stop_token_ids=[4, 5], ignore_eos=True), 17)
    assert (given["stop"], given["stop_token_ids"], given["ignore_eos"]) == (["x"], [4, 5], True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stop_token_ids": [-1]}, r"rollout\.stop_token_ids=\[-1\] is not allowed: ids of tokens, 0 to 16777215"),
        ({"stop_token_ids": [1 << 24]}, "ids of tokens"),
        ({"seeds": "maybe"}, r"rollout\.seeds='maybe' is not allowed: auto, always, never"),
    ],
)
def test_bounds(options, says):
    with pytest.raises(ConfigError, match=says):
        RolloutConfig(**options)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], 7),
        (["gate.on_stale=drop"], None),
        (["trainer.synchronous=true", "gate.max_lag=0"], None),
        (["gate.on_stale=drop", "rollout.seeds=always"], 7),
        (["rollout.seeds=never"], None),
    ],
)
def test_seeds_are_for_questions_that_are_sampled_again(options, wanted):
    assert compose("tiny", ["seed=7", *options]).request_seed == wanted


@pytest.mark.parametrize(("seeds", "has"), [("never", False), ("always", True)])
def test_requests_without_seeds(play, seeds, has):  # noqa: F811
    async def scene(room):
        await room.take(2)
        assert all(("seed" in request) == has for request in room.servers[0].requests)

    play(scene, seeds=seeds)


def test_generators_draw_from_different_random_numbers(tmp_path, tiny_model):
    """With one seed, two of them would answer a group's requests with the same tokens."""
    config = replace(make_config(tmp_path), seed=(1 << 32) - 1, generator=GeneratorConfig(count=2))
    config = replace(config, model=replace(config.model, name=str(tiny_model)))
    assert [engine_values(config, name, CPU_WORKER)["seed"] for name in ("g0", "g1")] == [(1 << 32) - 1, 0]
