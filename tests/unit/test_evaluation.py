"""Held-out questions under one version: what is asked, what counts, and what it comes to."""

import asyncio
import contextlib
import itertools
from dataclasses import replace

import aiohttp
import pytest
from in_process import in_process
from openai_server import Server, Tokens, choice
from rollout_samples import make_config

from inflight.bus import Link, Listener, Received
from inflight.config import ConfigError, EvalConfig, EvalSampling, TaskConfig, TrainerConfig
from inflight.evaluation.answer import MIXED, Answered
from inflight.evaluation.asking import Asking
from inflight.evaluation.evaluator import Evaluator, EvaluatorError
from inflight.evaluation.figures import MAX_REASONS, figures, pass_at, reasons
from inflight.messages import Evaluate, Evaluated, EvaluatorHello, Finish, Refused, StopEvaluating
from inflight.tasks import make
from inflight.tasks.addition import Addition
from inflight.tasks.check import require_held_out, usable_task
from inflight.tasks.progression import Progression

LIMIT_S = 30.0
ROOM = 256
"""generator.max_model_len."""


# --- questions that are held out ---


@pytest.mark.parametrize(
    "make_task",
    [
        lambda **options: Addition(seed=3, **options),
        lambda **options: Progression(seed=3, max_start=10, max_step=4, **options),
    ],
)
def test_questions_that_are_held_out_are_never_trained_on_and_always_the_same(make_task):
    task, whole = make_task(held_out=7), make_task()
    held = [task.held_out_item(index).key for index in range(task.held_out_size())]
    trained = [task.item(index).key for index in range(300)]
    assert len(set(held)) == 7
    assert not set(held) & set(trained)
    assert {*held, *trained} == {whole.item(index).key for index in range(300)}
    assert trained[:20] == [whole.item(index).key for index in range(20)]  # the order of the others stays
    assert whole.held_out_size() == 0


def test_a_task_without_questions_to_evaluate_by_is_refused(tmp_path):
    config, one = TaskConfig("addition"), TaskConfig("addition", {"held_out": 1})
    with pytest.raises(ConfigError, match=r"task\.name=addition holds no question out"):
        require_held_out(make(config, 0), replace(make_config(tmp_path), task=config))
    require_held_out(make(one, 0), replace(make_config(tmp_path), task=one))
    with pytest.raises(ConfigError, match="held_out=100 is not allowed: 0 to 99, of 100 questions"):
        make(TaskConfig("addition", {"held_out": 100}), 0)


def test_more_questions_than_are_held_out_are_not_taken_for_all(tmp_path):
    config = replace(make_config(tmp_path), task=TaskConfig("addition", {"held_out": 3}))
    for asked in (0, 1, 3):
        usable_task(replace(config, eval=EvalConfig(every=1, questions=asked)))
    says = (
        r"^eval\.questions=4 is not allowed: 1 to 3, which is how many .* task\.name=addition holds out, or 0 for all$"
    )
    with pytest.raises(ConfigError, match=says):
        usable_task(replace(config, eval=EvalConfig(every=1, questions=4)))


# --- figures ---


@pytest.mark.parametrize("answers", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_correct_one(answers):
    for correct, k in itertools.product(range(answers + 1), range(1, answers + 1)):
        drawn = list(itertools.combinations([index < correct for index in range(answers)], k))
        assert pass_at(k, answers, correct) == pytest.approx(sum(map(any, drawn)) / len(drawn), abs=1e-12)


def test_pass_at_k_of_large_numbers_is_exact():
    assert pass_at(1, 4096, 1024) == 0.25
    assert pass_at(100, 4096, 1) == pytest.approx(100 / 4096, abs=1e-12)


@pytest.mark.parametrize(("k", "answers", "correct"), [(0, 3, 1), (4, 3, 1), (1, 3, 4), (1, 0, 0)])
def test_pass_at_k_needs_k_answers(k, answers, correct):
    with pytest.raises(ValueError, match=f"pass@{k} of {answers}"):
        pass_at(k, answers, correct)


def test_figures_are_means_over_questions_and_leave_out_what_does_not_count():
    answered = [
        Answered(0, 0, 1.0, 10),
        Answered(0, 1, 0.0, 20, truncated=True),
        Answered(1, 0, 1.0, 30),
        Answered(1, 1, failed=MIXED),
        Answered(2, 0, failed="reward timeout"),
        Answered(2, 1, failed="reward timeout"),
    ]
    found = figures(answered, [1, 2], 1.0)
    assert found == {
        "questions": 3,
        "answers": 3,
        "mixed": 1,
        "failed": 2,
        "reward": 0.75,
        "reward_stderr": 0.25,
        "pass@1": 0.75,
        "pass@2": 1.0,
        "tokens": 20.0,
        "truncated": pytest.approx(1 / 3),
    }
    assert reasons(answered) == {MIXED: 1, "reward timeout": 2}


def test_without_an_answer_there_is_no_mean():
    assert figures([Answered(0, 0, failed="x")], [1], 1.0) == {"questions": 1, "answers": 0, "mixed": 0, "failed": 1}
    assert "reward_stderr" not in figures([Answered(0, 0, 1.0)], [1], 1.0)


def test_what_is_correct_is_a_matter_of_configuration():
    answered = [Answered(0, 0, 0.6), Answered(1, 0, 0.4)]
    assert figures(answered, [1], 1.0)["pass@1"] == 0.0
    assert figures(answered, [1], 0.5)["pass@1"] == 0.5


def test_very_many_reasons_are_told_as_one():
    found = reasons([Answered(0, each, failed=f"reason {each}") for each in range(MAX_REASONS + 5)])
    assert len(found) == MAX_REASONS + 1
    assert found["other"] == 5


# --- asking ---


class Arena:
    """A server, a task with questions held out, and what asks."""

    def __init__(self, tmp_path, server, **settings):
        self.server, task = server, settings.pop("task", None) or Addition(seed=0, held_out=3)
        settings.setdefault("sampling", EvalSampling(temperature=1.0, samples=2, max_tokens=5))
        rollout, rewards = settings.pop("rollout", {}), settings.pop("rewards", ())
        self.config = replace(make_config(tmp_path, **rollout), eval=EvalConfig(every=3, **settings))
        self.code = in_process(task, Tokens(), rewards=rewards)

    async def ask(self, version=4, **options):
        async with aiohttp.ClientSession() as session:
            self.asking = Asking(self.config, self.code, session)
            return await asyncio.wait_for(self.asking.ask(self.server.url, version, **options), LIMIT_S)


def of_version(version):
    return lambda: choice("07", version)


def asked(tmp_path, *answers, default=4, **settings):
    """Answered of an arena whose server gives `answers` first."""

    async def scene():
        async with Server(of_version(default)) as server:
            server.answers = list(answers)
            arena = Arena(tmp_path, server, **settings)
            return await arena.ask(), server.requests, arena

    return asyncio.run(scene())


def test_all_held_out_are_asked_with_a_sampling_of_their_own(tmp_path):
    answered, requests, arena = asked(tmp_path, concurrency=1)
    assert [(each.question, each.sample, each.failed) for each in answered] == [
        (question, sample, "") for question in range(3) for sample in range(2)
    ]
    task = Addition(seed=0, held_out=3)
    prompts = [Tokens().encode(task.held_out_item(index).prompt) for index in range(3)]
    assert [request["prompt"] for request in requests] == [prompt for prompt in prompts for _ in range(2)]
    assert all((each["max_tokens"], each["temperature"], each["top_p"]) == (5, 1.0, 1.0) for each in requests)
    assert len({request["seed"] for request in requests}) == 6
    again = asked(tmp_path, concurrency=1)[1]
    assert [request["seed"] for request in again] == [request["seed"] for request in requests]
    assert arena.asking.done == 6


def test_an_answer_ends_as_those_that_are_trained_on_do(tmp_path):
    ends = {"stop": ["x"], "stop_token_ids": [4], "ignore_eos": True}
    _, requests, _ = asked(tmp_path, rollout=ends)
    assert all({name: request[name] for name in ends} == ends for request in requests)
    assert not any(ends.keys() & request.keys() for request in asked(tmp_path)[1])


def test_questions_that_are_longer_than_the_run_allows_are_not_asked(tmp_path):
    longest = min(len(Addition(seed=0, held_out=3).held_out_item(index).prompt) for index in range(3)) - 1
    answered, requests, _ = asked(tmp_path, rollout={"max_prompt_tokens": longest})
    assert ({each.failed for each in answered}, requests) == ({"prompt too long"}, [])


def test_a_greedy_answer_needs_no_seed_and_its_room_is_the_models(tmp_path):
    _, requests, arena = asked(tmp_path, sampling=EvalSampling(max_tokens=ROOM - 1), questions=2)
    assert len(requests) == 2
    assert all("seed" not in request and request["temperature"] == 0.0 for request in requests)
    assert arena.config.generator.max_model_len == ROOM
    assert all(request["max_tokens"] + len(request["prompt"]) == ROOM for request in requests)


@pytest.mark.parametrize(
    "mixed",
    [
        {"token_versions": [[0, 4], [1, 5]]},
        {"token_versions": [[0, 5]]},
        {"prefill_versions": [[0, 0, 3]]},
    ],
)
def test_an_answer_that_is_not_wholly_of_the_pinned_version_is_counted_and_not_averaged(tmp_path, mixed):
    answered, _, _ = asked(tmp_path, choice("07", 4, **mixed), concurrency=1)
    assert [each.failed for each in answered] == [MIXED, "", "", "", "", ""]
    assert figures(answered, [1], 1.0)["answers"] == 5


def test_a_request_that_fails_is_repeated_and_one_that_is_refused_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("inflight.evaluation.asking.PAUSE_S", 0.01)
    refusals = [503, 503, "again", 400, 500, 500, 500]
    answered, requests, _ = asked(
        tmp_path, *(of_version(4) if each == "again" else each for each in refusals), concurrency=1
    )
    assert [each.failed for each in answered] == ["", "http 400", "http 500", "", "", ""]
    assert len(requests) == 7 + 3


def test_questions_and_scores_that_fail_cost_their_answers(tmp_path):
    class Odd(Addition):
        def held_out_item(self, index):
            if index == 0:
                raise RuntimeError("no such file")
            return super().held_out_item(index)

        async def score(self, item, completion):
            if item.key == self.held_out_item(1).key:
                raise KeyError("answer")
            return 0.5

    answered, requests, _ = asked(tmp_path, task=Odd(seed=0, held_out=3), concurrency=1)
    assert [each.failed for each in answered] == [
        *["task error: RuntimeError"] * 2,
        *["reward error: KeyError"] * 2,
        "",
        "",
    ]
    assert [each.reward for each in answered[4:]] == [0.5, 0.5]
    assert len(requests) == 4


def test_no_more_requests_are_under_way_than_configured(tmp_path):
    gate = asyncio.Event()

    async def held():
        await gate.wait()
        return choice("07", 4)

    async def scene():
        async with Server(held) as server:
            asked = asyncio.create_task(Arena(tmp_path, server, concurrency=2).ask())
            async with asyncio.timeout(LIMIT_S):
                while server.active < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            gate.set()
            await asked
            return server.most_active

    assert asyncio.run(scene()) == 2


# --- the evaluator ---


class Stage:
    """An evaluator and, in place of the trainer, a listener."""

    def __init__(self, listener, evaluator):
        self.listener, self.evaluator = listener, evaluator

    async def hear(self, kind):
        """The next message of a kind; hellos come all the while."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = await asyncio.to_thread(self.listener.receive, 0.05)
                if isinstance(event, Received) and isinstance(event.message, kind):
                    return event.message

    def say(self, message):
        self.listener.send("evaluator", message)


@pytest.fixture
def stage(tmp_path, bus_endpoint):
    def play(scene, default=None, **settings):
        async def run():
            async with Server(default or of_version(4)) as server, aiohttp.ClientSession() as session:
                arena = Arena(tmp_path, server, **settings)
                bus = arena.config.bus
                with Listener(bus_endpoint, bus) as listener, Link(bus_endpoint, "evaluator", bus) as link:
                    evaluator = Evaluator(arena.config.eval, link, Asking(arena.config, arena.code, session))
                    running = asyncio.create_task(evaluator.run())
                    try:
                        await scene(Stage(listener, evaluator), server, running)
                    finally:
                        running.cancel()
                        with contextlib.suppress(asyncio.CancelledError, EvaluatorError):
                            await running

        asyncio.run(run())

    return play


def order(server, number=1, timeout_s=LIMIT_S):
    return Evaluate(number=number, version=4, url=server.url, timeout_s=timeout_s)


def test_the_evaluator_answers_an_order_and_its_repeat_and_ends_with_the_run(stage):
    async def scene(stage, server, running):
        assert (await stage.hear(EvaluatorHello)).answers == 6
        stage.say(order(server))
        result = await stage.hear(Evaluated)
        assert (result.number, result.problem, result.failed) == (1, "", {})
        assert result.figures["answers"] == 6
        stage.say(order(server))
        assert await stage.hear(Evaluated) == result
        assert len(server.requests) == 6  # nothing was asked anew
        assert stage.evaluator.status() == {"evaluations": 1, "late": 0, "answers": 0, "wanted": 6}
        stage.say(Finish(reason="all steps are done"))
        assert await asyncio.wait_for(running, LIMIT_S) == "all steps are done"

    stage(scene)


def test_an_order_is_bounded_and_says_how_far_it_came(stage):
    first = iter([True])

    async def once_and_never():
        if not next(first, False):
            await asyncio.sleep(3600)
        return choice("07", 4)

    async def scene(stage, server, running):
        await stage.hear(EvaluatorHello)
        stage.say(order(server, timeout_s=0.5))
        result = await stage.hear(Evaluated)
        assert result.problem == "1 of 6 answers came within 0.5 s"
        assert result.figures["answers"] == 1
        assert stage.evaluator.status() == {"evaluations": 0, "late": 1, "answers": 0, "wanted": 6}

    stage(scene, default=once_and_never)


def test_a_stop_and_a_newer_order_end_the_one_that_is_under_way(stage):
    async def never():
        await asyncio.sleep(3600)

    async def scene(stage, server, running):
        async def until(condition):
            async with asyncio.timeout(LIMIT_S):
                while not condition():  # noqa: ASYNC110 - conditions of all kinds
                    await asyncio.sleep(0.01)

        await stage.hear(EvaluatorHello)
        server.answers = [never] * 12
        stage.say(order(server, 1))
        await until(lambda: len(server.requests) == 6)
        stage.say(StopEvaluating(number=1))
        await until(lambda: stage.evaluator._working is None)
        await stage.evaluator._order(order(server, 1))  # a late repeat
        assert stage.evaluator._working is None
        stage.say(order(server, 2))
        await until(lambda: len(server.requests) == 12)
        stage.say(order(server, 3))
        assert (await stage.hear(Evaluated)).number == 3
        assert len(server.requests) == 18

    stage(scene)


def test_an_evaluator_that_is_refused_or_meets_an_engine_without_tags_ends_with_the_reason(stage):
    async def scene(stage, server, running):
        await stage.hear(EvaluatorHello)
        server.default = choice("07", 4, token_versions=None)
        stage.say(order(server))
        with pytest.raises(EvaluatorError, match="without token_versions: its vLLM is not patched"):
            await asyncio.wait_for(running, LIMIT_S)

    stage(scene)

    async def refused(stage, server, running):
        await stage.hear(EvaluatorHello)
        stage.say(Refused(reason="not you"))
        with pytest.raises(EvaluatorError, match="refused by the trainer: not you"):
            await asyncio.wait_for(running, LIMIT_S)

    stage(refused)


# --- configuration ---


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pass_k": [1, 2]}, r"eval.pass_k=\[1, 2\] is not allowed: numbers from 1 to eval.sampling.samples=1"),
        ({"pass_k": []}, "eval.pass_k"),
        ({"best_by": "pass@4"}, "eval.best_by='pass@4' is not allowed: reward, pass@1"),
        ({"training_requests": "wait"}, "eval.training_requests='wait' is not allowed: continue, pause"),
        ({"timeout_s": 0}, "eval.timeout_s"),
    ],
)
def test_settings_of_an_evaluation_are_checked(settings, says):
    with pytest.raises(ConfigError, match=says):
        EvalConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"samples": 2}, "eval.sampling.samples=2 is not allowed: 1 with eval.sampling.temperature=0"),
        ({"top_p": 0.5}, "eval.sampling.top_p=0.5 is not allowed: 1 with eval.sampling.temperature=0"),
        ({"temperature": 0.001}, "eval.sampling.temperature=0.001"),
    ],
)
def test_sampling_of_an_evaluation_is_checked(settings, says):
    with pytest.raises(ConfigError, match=says):
        EvalSampling(**settings)


def test_an_evaluation_fits_its_run(tmp_path):
    config = make_config(tmp_path)

    def refused(says, trainer=None, **settings):
        with pytest.raises(ConfigError, match=says):
            replace(config, trainer=trainer or config.trainer, eval=EvalConfig(every=1, **settings))

    room = config.generator.max_model_len
    refused(f"eval.sampling.max_tokens={room} is not allowed", sampling=EvalSampling(max_tokens=room))
    bound = config.trainer.batch_timeout_s
    refused("below trainer.batch_timeout_s", training_requests="pause", timeout_s=bound)
    replace(config, eval=EvalConfig(every=1, training_requests="continue", timeout_s=bound))
    several = replace(config, generator=replace(config.generator, count=2))
    replace(several, eval=EvalConfig(every=1, training_requests="pause", timeout_s=bound))


def test_a_synchronous_run_pauses_for_an_evaluation(tmp_path):
    config = make_config(tmp_path)
    synchronous = replace(
        config, gate=replace(config.gate, max_lag=0), trainer=replace(TrainerConfig(), synchronous=True)
    )
    with pytest.raises(ConfigError, match=r"eval\.training_requests='continue' is not allowed: pause"):
        replace(synchronous, eval=EvalConfig(every=1))
    replace(synchronous, eval=EvalConfig(every=1, training_requests="pause"))
