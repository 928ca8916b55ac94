"""A teacher's word: from the teacher, through the actor's scoring, to the rollout."""

from __future__ import annotations

import asyncio
import dataclasses

import aiohttp
import pytest
import torch
from aiohttp import web
from in_process import in_process
from openai_server import Server, Tokens, choice
from rollout_samples import make_config
from transformers import AutoModelForCausalLM

from inflight.actor.pool import Pool
from inflight.actor.sampler import GroupLost, Sampler
from inflight.config import ConfigError, TaskConfig
from inflight.tasks import Score, make
from inflight.tasks.base import Item
from inflight.tasks.distillation import TeacherError
from inflight.types import PrefillSpan, StepReward, Turn, VersionSpan

PROMPT, COMPLETION = [3, 4, 13], [5, 6, 7, 8]
TURN = Turn(
    token_ids=COMPLETION,
    logprobs=[-1.0] * 4,
    token_versions=[VersionSpan(0, 0)],
    prefill_versions=[PrefillSpan(0, 0, 0)],
    finish_reason="stop",
)


def distillation(**options):
    return make(TaskConfig("distillation", {"task": "addition"} | options), seed=0)


def score(task):
    return asyncio.run(task.score_turn(task.item(0), PROMPT, TURN, "07"))


def test_a_local_teacher_says_what_transformers_says(tiny_untied_model):
    task = distillation(teacher="tiny-untied")
    got = score(task)
    model = AutoModelForCausalLM.from_pretrained(tiny_untied_model)
    with torch.no_grad():
        full = model(torch.tensor([PROMPT + COMPLETION])).logits[0].float().log_softmax(dim=-1)
    wanted = [float(full[len(PROMPT) + t - 1, token]) for t, token in enumerate(COMPLETION)]
    assert got.teacher_logprobs == pytest.approx(wanted, abs=1e-5)
    assert got.reward == asyncio.run(task.score(task.item(0), "07"))


async def against_server(answer, ask):
    """Runs `ask(url)` against a server that answers completions with `answer(request)`."""

    async def complete(request):
        return answer(await request.json())

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        return await ask(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def ask(url):
    task = distillation(teacher=url, model="big")
    return task.score_turn(task.item(0), PROMPT, TURN, "07")


def test_a_server_is_asked_for_the_prompt_of_prompt_and_completion():
    seen = []

    def answer(request):
        seen.append(request)
        rows = [None] + [{str(token): {"logprob": -0.1 * token, "rank": 1}} for token in request["prompt"][1:]]
        return web.json_response({"choices": [{"prompt_logprobs": rows}]})

    got = asyncio.run(against_server(answer, ask))
    assert got.teacher_logprobs == pytest.approx([-0.5, -0.6, -0.7, -0.8])
    assert seen[0]["prompt"] == PROMPT + COMPLETION
    assert (seen[0]["model"], seen[0]["prompt_logprobs"]) == ("big", 0)


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: web.Response(status=500, text="no"),
        lambda request: web.Response(text="{"),
        lambda request: web.json_response({"choices": []}),
        lambda request: web.json_response({"choices": [{"prompt_logprobs": [None] * 7}]}),
        lambda request: web.json_response({"choices": [{"prompt_logprobs": [{"99": {"logprob": 0.0}}] * 7}]}),
    ],
)
def test_a_teacher_that_does_not_answer_loses_the_group(answer):
    with pytest.raises(TeacherError):
        asyncio.run(against_server(answer, ask))


def test_no_server_at_the_address():
    with pytest.raises(TeacherError, match=r"127\.0\.0\.1:9"):
        asyncio.run(ask("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher": "/nowhere"}, "can't be loaded"),
        ({"teacher": "tiny", "task": "x"}, "not known"),
        ({}, "teacher is missing"),
    ],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(ConfigError, match=words):
        distillation(**options)


@dataclasses.dataclass
class Steps:
    """Scores tokens itself."""

    score_: Score

    def item(self, index):
        return Item(key="k", prompt="07", answer="")

    async def score(self, item, completion):
        raise AssertionError("score_turn is there")

    async def score_turn(self, item, prompt_ids, turn, completion):
        assert list(prompt_ids) == Tokens().encode("07")
        assert completion == Tokens().decode(turn.token_ids)
        return self.score_


def sample(tmp_path, score_):
    async def main():
        async with (
            Server(lambda: choice("019")) as server,
            aiohttp.ClientSession() as session,
            Pool(session, ["g0"], lambda name: server.url) as pool,
        ):
            config = make_config(tmp_path).rollout
            sampler = Sampler(config, 0, in_process(Steps(score_), Tokens()), session, pool, longest_prompt=63)
            return (await sampler.group("g", 0)).rollouts[0]

    return asyncio.run(main())


def test_what_a_task_says_of_tokens_comes_into_the_rollout(tmp_path):
    rollout = sample(tmp_path, Score(0.5, [(1, 1.0), (2, -1.0)], [-0.1, -0.2, -0.3]))
    assert rollout.reward == 0.5
    assert rollout.step_rewards == [StepReward(1, 1.0), StepReward(2, -1.0)]
    assert rollout.teacher_logprobs == [-0.1, -0.2, -0.3]


@pytest.mark.parametrize(
    "bad", [Score(float("nan")), Score(1.0, [(0, float("inf"))]), Score(1.0, (), [0.0, 0.0, float("-inf")])]
)
def test_a_part_that_is_no_number_loses_the_group(tmp_path, bad):
    with pytest.raises(GroupLost, match="not finite"):
        sample(tmp_path, bad)
