"""The rule by which recorded log-probabilities are compared with a model's, on logits that are rounded here."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.agreement import LEAST_PROMPTS, STEP, compare

LENGTH = 24
DTYPES = list(STEP)


def sampled(prompts, *, spread, dtype, temperature=1.0, recorded_at=None, seed=0):
    """(recorded, replayed, prompt): tokens drawn from logits of this spread that are 8 roundings off.

    `recorded_at` is the temperature of the recorded values, if not that of the draw.
    """
    source = np.random.default_rng(seed)
    tokens = prompts * LENGTH
    exact = source.normal(0, spread, (tokens, 60))
    rounded = exact + source.normal(0, 8 * STEP[dtype], exact.shape)
    rows, chosen = np.arange(tokens), (rounded / temperature + source.gumbel(size=exact.shape)).argmax(1)

    def logprobs(logits):
        logits = logits - logits.max(1, keepdims=True)
        return logits[rows, chosen] - np.log(np.exp(logits).sum(1))

    return logprobs(rounded / (recorded_at or temperature)), logprobs(exact / temperature), rows // LENGTH


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0], ids=["unsure", "mixed", "certain"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("prompts", [1, LEAST_PROMPTS, 60])
def test_rounding_agrees_however_sure_the_model_is(dtype, spread, temperature, prompts):
    for seed in range(3):
        recorded, replayed, prompt = sampled(prompts, spread=spread, dtype=dtype, temperature=temperature, seed=seed)
        found = compare(recorded, replayed, dtype, temperature=temperature, prompt=prompt)
        assert found.agrees, found.problems
        assert found.steps < 12


FAULTS = {
    "constant": lambda recorded, source: np.full_like(recorded, -1.0),
    "random": lambda recorded, source: -8 * source.random(len(recorded)),
    "a token late": lambda recorded, source: np.roll(recorded, 1),
    "of another sequence": lambda recorded, source: np.roll(recorded, LENGTH),
    "offset": lambda recorded, source: recorded + 0.05,
    "negative offset": lambda recorded, source: recorded - 0.05,
    "no number": lambda recorded, source: np.where(np.arange(len(recorded)) == 3, np.nan, recorded),
    "infinite": lambda recorded, source: np.where(np.arange(len(recorded)) == 3, -np.inf, recorded),
    "one value far off": lambda recorded, source: recorded - 8 * (np.arange(len(recorded)) == 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0], ids=["unsure", "mixed", "certain"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_rounding_does_not_agree(dtype, spread, fault):
    recorded, replayed, prompt = sampled(60, spread=spread, dtype=dtype)
    wrong = FAULTS[fault](recorded, np.random.default_rng(1))
    assert not compare(wrong, replayed, dtype, prompt=prompt).agrees


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0])
def test_log_probabilities_of_another_temperature_do_not_agree(dtype, spread):
    recorded, replayed, prompt = sampled(60, spread=spread, dtype=dtype, temperature=0.7, recorded_at=1.0)
    assert not compare(recorded, replayed, dtype, temperature=0.7, prompt=prompt).agrees


def test_a_cut_that_is_not_known_may_change_a_token_of_which_the_model_is_sure():
    recorded, replayed, prompt = sampled(60, spread=4.0, dtype="bfloat16")
    recorded[5], replayed[5] = -0.2, 0.0  # one token alone was left in the replay, two in the generator
    assert not compare(recorded, replayed, "bfloat16", prompt=prompt).agrees
    assert compare(recorded, replayed, "bfloat16", prompt=prompt, cut=np.ones(len(recorded), dtype=bool)).agrees


def test_nothing_to_compare_shows_in_the_count_of_tokens():
    found = compare([], [], "bfloat16")
    assert found.tokens == 0
    assert np.isnan(found.steps)
    with pytest.raises(ValueError, match=r"\(2,\) recorded log-probabilities, \(1,\) replayed"):
        compare([-1.0, -1.0], [-1.0], "bfloat16")
    with pytest.raises(KeyError):
        compare([-1.0], [-1.0], "int8")
