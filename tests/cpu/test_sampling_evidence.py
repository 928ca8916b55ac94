"""A real server: at lag zero the trainer's log-probabilities are the recorded ones, if it cuts as vLLM did."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode

import aiohttp
import pytest
import torch
from rollout_requests import ServedModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from inflight.completions import complete, sampling
from inflight.config import GateConfig, RolloutConfig, Sampling, TaskConfig
from inflight.models import prepare
from inflight.packed_logprobs import unpack
from inflight.rollout.gate import gate_group
from inflight.tasks import make
from inflight.trainer.advantage import group_mean
from inflight.trainer.batch import collate
from inflight.trainer.logprobs import score_tokens
from inflight.types import Rollout, RolloutGroup, Turn

pytestmark = pytest.mark.vllm

PROMPTS = [[3, 4, 5, 13], [6, 6], [7, 8, 9, 13, 10, 11], [12]]
VOCABULARY = 17
FLAT_VOCABULARY = 512
TOLERANCE = 1e-4
"""Nats; both sides compute in float32."""
SERVER = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "chat_template": "{% for each in messages %}{{ each.content }}{% endfor %}=",
    "enable_prompt_tokens_details": True,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = ServedModel(tmp_path_factory.mktemp("evidence"), "tiny", server=SERVER)
    yield model
    model.close()


def sample(served, config: RolloutConfig, vocabulary: int = VOCABULARY):
    """A batch of four sequences, sampled as the actor does it."""

    async def ask():
        common = sampling(config, vocabulary)
        async with aiohttp.ClientSession() as session:
            return [
                await complete(session, "g0", served.url, common | {"prompt": prompt, "seed": seed}, 120.0)
                for seed, prompt in enumerate(PROMPTS)
            ]

    rollouts = [
        Rollout(
            rollout_id=f"g/{i}",
            group_id="g",
            prompt_ids=PROMPTS[i],
            turn=turn,
            reward=float(i),
            generator="g0",
            started=0.0,
            finished=1.0,
            first_token_s=0.0,
        )
        for i, turn in enumerate(asyncio.run(ask()))
    ]
    gated = gate_group(RolloutGroup(group_id="g", prompt_key="k", rollouts=rollouts), 0, GateConfig())
    return collate([gated], advantage=group_mean, normalise="token", max_tokens=config.max_tokens)


def log_ratios(served, batch, sampling):
    with torch.no_grad():
        now = score_tokens(served.policy, batch, sampling).logprobs
    return (now - batch.behaviour_logprobs)[batch.trained_mask].abs()


@pytest.mark.parametrize("kept_tokens", [19, 11, 0])
def test_top_p(served, kept_tokens):
    """With recorded sets, with some of them too large to be recorded, and with none."""
    config = RolloutConfig(max_tokens=48, top_p=0.9, kept_tokens=kept_tokens)
    batch = sample(served, config)
    assert int(batch.trained_mask.sum()) > 60
    if kept_tokens:
        recorded = (batch.kept >= 0).any(dim=2)[batch.trained_mask]
        assert recorded.any()
        assert recorded.all() == (kept_tokens > 11), "larger sets are not"
    else:
        assert batch.kept is None
    assert log_ratios(served, batch, Sampling.of(config)).max() < TOLERANCE
    assert log_ratios(served, batch, Sampling()).mean() > 0.02, "the mass that was cut off, on average about a tenth"


@pytest.fixture(scope="module")
def served_flat(tmp_path_factory):
    """A model of 512 tokens that finds nearly all of them likely: sets far beyond what is recorded by default."""
    folder = tmp_path_factory.mktemp("flat")
    shape = AutoConfig.from_pretrained(prepare("tiny"), vocab_size=FLAT_VOCABULARY, initializer_range=0.02)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape).float().save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(prepare("tiny")).save_pretrained(folder / "model")
    model = ServedModel(folder / "run", str(folder / "model"), RolloutConfig(kept_tokens=FLAT_VOCABULARY))
    yield model
    model.close()


@pytest.mark.parametrize("kept_tokens", [19, FLAT_VOCABULARY])
def test_sets_of_hundreds(served_flat, kept_tokens):
    """Computed anew from what was recorded of the sampling, or recorded as they were because the run asked for it."""
    config = RolloutConfig(max_tokens=48, top_p=0.99, kept_tokens=kept_tokens)
    batch = sample(served_flat, config, FLAT_VOCABULARY)
    assert int(batch.trained_mask.sum()) > 60
    if kept_tokens == FLAT_VOCABULARY:
        sizes = (batch.kept >= 0).sum(dim=2)[batch.trained_mask]
        assert sizes.min() > 100, "all were recorded"
        assert sizes.max() < FLAT_VOCABULARY, "something was cut off"
    else:
        assert batch.kept is None, "none fits"
    ratios = log_ratios(served_flat, batch, Sampling.of(config))
    assert ratios.max() < TOLERANCE
    # Without the cut every token is off by the logarithm of the mass that was kept, about 0.01.
    assert log_ratios(served_flat, batch, Sampling()).min() > 50 * TOLERANCE


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7, "top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "top_p": 0.95},
    ],
)
def test_everything_else(served, how):
    config = RolloutConfig(max_tokens=48, **how)
    batch = sample(served, config)
    assert log_ratios(served, batch, Sampling.of(config)).max() < TOLERANCE
    assert log_ratios(served, batch, Sampling()).mean() > 0.02


async def body_of(url: str, request: dict) -> list[dict]:
    """The choices of an answer, streamed or not."""
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json=request) as answer:
            assert answer.status == 200, await answer.text()
            if not request["stream"]:
                return (await answer.json())["choices"]
            events = [line.removeprefix(b"data: ") for line in (await answer.read()).split(b"\n") if line.strip()]
            return [choice for event in events[:-1] for choice in json.loads(event)["choices"]]


def versions_of(choices: list[dict]) -> list[list[int]]:
    """The spans of an answer's tokens; those of a stream's chunks that continue each other are one."""
    spans: list[list[int]] = []
    for start, version in (span for each in choices for span in each["token_versions"]):
        if not spans or spans[-1][1] != version:
            spans.append([start, version])
    return spans


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kept_tokens", [16, 11])
def test_packed_numbers_are_those_of_top_logprobs(served, stream, kept_tokens):
    config = RolloutConfig(max_tokens=80, top_p=0.9, kept_tokens=kept_tokens, ignore_eos=True)
    packed = sampling(config, VOCABULARY) | {"prompt": PROMPTS[0], "seed": 3, "stream": stream}
    plain = packed | {
        "return_packed_logprobs": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    told, got = (asyncio.run(body_of(served.url, each)) for each in (plain, packed))
    # How many tokens a chunk of a stream has depends on when it was read.
    assert stream or len(got) == len(told) == 1
    assert all(each.get("token_ids") is None and each["logprobs"] is None for each in got)
    drawn = unpack([b64decode(each["packed_logprobs"]) for each in got], packed["logprobs"])
    assert drawn.token_ids.tolist() == [token for each in told for token in each["token_ids"]]
    plainly = [each["logprobs"] for each in told]
    assert drawn.logprobs.tolist() == [value for each in plainly for value in each["token_logprobs"]], "to the last bit"
    kinds = set()
    for kept, top in zip(drawn.kept, [top for each in plainly for top in each["top_logprobs"]], strict=True):
        possible = {int(key.removeprefix("token_id:")) for key, value in top.items() if value > -9999.0}
        kinds.add(len(possible) < packed["logprobs"])
        assert set(kept) == (possible if len(possible) < packed["logprobs"] else set())
    assert versions_of(got) == versions_of(told)
    assert kinds == ({True} if kept_tokens == 16 else {True, False}), "sets that fit, and some that do not"


def test_a_request_with_tools_is_served_with_the_runs_own_parser(served):
    """Without `generator.server` vLLM answers 400."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    body = {
        "messages": [{"role": "user", "content": "1+2"}],
        "tools": [tool],
        "tool_choice": "auto",
        "max_tokens": 4,
    }

    async def ask():
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
                return answer.status, await answer.json()

    status, answer = asyncio.run(ask())
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 4, "by the run's own chat template"
    assert "cached_tokens" in answer["usage"]["prompt_tokens_details"]


def test_a_real_server_as_a_teacher(served):
    """Its word on the tokens is that of the same weights here."""
    config = RolloutConfig(max_tokens=24)
    batch = sample(served, config)
    task = make(TaskConfig("distillation", {"teacher": served.url, "task": "addition"}), 0)
    with torch.no_grad():
        here = score_tokens(served.policy, batch, Sampling()).logprobs
    for row in range(len(PROMPTS)):
        drawn = batch.completion_mask[row]
        ids = batch.input_ids[row][drawn].tolist()
        turn = Turn(token_ids=ids, logprobs=[], token_versions=[], prefill_versions=[], finish_reason="length")
        score = asyncio.run(task.score_turn(task.item(0), PROMPTS[row], turn, ""))
        assert score.teacher_logprobs == pytest.approx(here[row][drawn].tolist(), abs=TOLERANCE)
