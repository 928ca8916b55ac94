"""A generator's numbers against a trainer's, with a real vLLM: of a model whose positions transformers and vLLM scale
differently beyond a length, and whose vocabulary is larger than its tokenizer's."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from padded_models import PIECES, VOCABULARY, make_padded
from test_swap_server import KEY, Run, reference

from inflight.config import Sampling
from inflight.weights.publish.comparison import NumbersDiffer

pytestmark = pytest.mark.vllm
TRAINED = 64
"""Positions up to which both agree: transformers then scales by the length so far, vLLM by a fixed one."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("n")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = make_padded(folder / "model", max_position_embeddings=TRAINED, rope_parameters=rope)
    (folder / "run").mkdir()
    run = Run(folder / "run", str(model))
    yield run
    run.close()


def prompts(*lengths):
    source = random.Random(1)
    return [[source.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@contextlib.contextmanager
def own_temperature(policy, temperature):
    """Within, the policy's logits are divided by it."""
    hook = policy.lm_head.register_forward_hook(lambda module, inputs, logits: logits / temperature)
    yield
    hook.remove()


def compare(run, *lengths, temperature=1.0, score_at=None):
    def score(asked):
        with own_temperature(run.policy, score_at or temperature):
            return [reference(run.policy, prompt, tokens).tolist() for prompt, tokens in asked]

    return run.publisher.compare(
        score,
        prompts(*lengths),
        sampling=Sampling(temperature=temperature),
        api_key=KEY,
    )


def test_short_prompts_agree_before_and_after_a_swap_and_ids_without_a_piece_are_sampled(run):
    (found,) = compare(run, 4, 4, 20, 20, 40, 40)
    assert found.version == run.publisher.version
    version = run.publisher.version + 1
    run.publish(version)
    (found,) = compare(run, 4, 4, 20, 20, 40, 40, temperature=0.7)
    assert (found.version, found.agreement.tokens) == (version, 6 * 8)
    assert found.agreement.largest < 1e-4
    assert any(token >= len(PIECES) for token in run.ask(PIECES_PROMPT, 32)["token_ids"])


PIECES_PROMPT = [4, 5, 14]


def test_another_temperature_is_refused(run):
    with pytest.raises(NumbersDiffer, match="roundings of float32"):
        compare(run, 4, 20, 40, score_at=0.9)


@pytest.mark.slow  # vLLM reads memory that is not its table's there: not in a run that others' tests share
def test_what_is_scaled_otherwise_beyond_a_length_is_refused(run):
    with pytest.raises(NumbersDiffer) as error:
        compare(run, 4, 4, 4, 24, 24, 24, 128, 128, 128, 200, 200, 200)
    said = str(error.value)
    # vLLM reads behind its table of positions there: other numbers or NaN, also in sequences of the same batch.
    says = f"g0 does not compute what the trainer does, at version {run.publisher.version}: after "
    assert re.match(re.escape(says) + r"(a prompt|prompts) of [0-9]+ tokens", said), said
    assert "usual suspects: rope scaling, sliding window" in said
