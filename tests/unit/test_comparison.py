"""Numbers compared between trainer and generators, over real HTTP, with real models on both sides."""

import asyncio
import dataclasses
import random

import pytest
import torch
from fake_generator import FakeGenerator, eventually
from model_server import ModelServer
from test_publisher import QUICK
from test_trainer_run import Run, train
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from inflight.bus import Listener
from inflight.config import BusConfig, ConfigError, Sampling, TrainerConfig
from inflight.messages import Refused
from inflight.trainer import start_comparison as starts
from inflight.trainer.start_comparison import edges, prompts_for
from inflight.types import Route
from inflight.weights.publish.comparison import REQUESTS, NumbersDiffer, compare
from inflight.weights.publish.publisher import Publisher
from inflight.weights.publish.states import ReplicaState
from inflight.weights.source import WeightSource

SUSPECTS = "the usual suspects: rope scaling, sliding window, logit soft cap, dtype, temperature, vocabulary"
VOCABULARY = 17


def window(ids, logits):
    """As a generator whose sliding window is wrong: right for short sequences."""
    logits = logits.clone()
    logits[40:] = logits[40:].roll(1, dims=-1)
    return logits


def hotter(ids, logits):
    return logits / 0.9


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture
def serve(tiny_model):
    servers = []

    def start(**options):
        servers.append(ModelServer(tiny_model, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def scorer(model, temperature=1.0):
    """A trainer of one's own: what it computes with its own module."""

    @torch.no_grad()
    def score(asked):
        found = []
        for prompt, tokens in asked:
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / temperature
            found.append(logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())
        return found

    return score


def prompts(*lengths):
    source = random.Random(0)
    return [[source.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def route(server, version=0):
    return Route(url=server.url, version=version, incarnation="")


def ask(servers, score, lengths=(4, 4, 20, 20, 60, 60), **settings):
    served = {f"g{index}": each if isinstance(each, Route) else route(each) for index, each in enumerate(servers)}
    settings = {"dtype": "float32", "sampling": Sampling()} | settings
    return compare(served, score, prompts(*lengths), **settings)


def test_equal_models_agree(serve, model):
    (found,) = ask([server := serve()], scorer(model))
    assert found.shown
    assert found.agreement.tokens == 6 * 8
    assert found.agreement.largest < 1e-4
    assert {body["ignore_eos"] for body in server.requests} == {True}
    assert sorted(len(body["prompt"]) for body in server.requests) == [4, 4, 20, 20, 60, 60]


def test_a_caller_may_run_in_an_event_loop(serve, model):
    async def within():
        return ask([serve()], scorer(model))

    assert asyncio.run(within())[0].shown


def test_a_fault_beyond_a_length_is_reported_with_the_length(serve, model):
    (found,) = ask([serve(change=window)], scorer(model))
    assert str(found).startswith(
        "g0 does not compute what the trainer does, at version 0: after prompts of 60 tokens sent together, "
    )
    assert str(found).endswith(SUSPECTS)
    assert "nats" in str(found)
    assert "\n" not in str(found)


def test_what_is_wrong_for_a_sequence_alone_is_found(serve, model):
    """A CUDA graph captured for one sequence may be wrong where those for more are right."""
    server = serve(change=lambda ids, logits: hotter(ids, logits) if len(server.requests) <= 3 else logits)
    (found,) = ask([server], scorer(model))
    assert "after prompts of 4 tokens sent alone, the median difference" in str(found)
    assert [len(body["prompt"]) for body in server.requests[:3]] == [4, 20, 60]


def test_a_prompt_that_is_sent_alone_has_no_other_beside_it(serve, model):
    server = serve()
    server.hold = []
    (found,) = ask([server], scorer(model), stop=lambda: bool(server.hold))
    assert len(server.requests) == 1
    assert not found.shown


def test_another_temperature_is_found(serve, model):
    (found,) = ask([serve(change=hotter)], scorer(model))
    assert "roundings of float32" in found.problem


def test_the_sampling_that_is_configured_is_compared(serve, model):
    (found,) = ask([serve()], scorer(model, temperature=0.7), sampling=Sampling(temperature=0.7))
    assert found.shown


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bfloat16_has_a_bound_of_its_own(serve, tiny_model, dtype):
    rounded = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    (found,) = ask([serve()], scorer(rounded), dtype=dtype)
    assert found.shown == (dtype == "bfloat16")


def test_a_generator_that_does_not_answer_is_named_and_costs_no_other(serve, model):
    silent, well = serve(), serve()
    silent.hold = []
    first, second = ask([silent, well], scorer(model), lengths=(4, 20), timeout_s=2.0)
    assert str(first).startswith("g0 could not be compared with the trainer: 2 of 2 requests: g0: no answer within")
    assert second.shown


def test_one_that_is_gone_or_stamps_another_version_is_not_compared(serve, model):
    gone = Route(url="http://127.0.0.1:1", version=0, incarnation="")
    first, second = ask([gone, route(serve(), version=3)], scorer(model))
    assert first.agreement is None
    assert "ClientConnectorError" in first.unanswered
    assert second.agreement is None
    assert second.unanswered == "6 of 6 requests: an answer of version 0, not 3"


def test_a_log_probability_that_is_no_number_is_a_difference(serve, model):
    """vLLM's JSON has no NaN: such an answer is an error of status 400."""
    server = serve()
    server.broken = 60
    (found,) = ask([server], scorer(model))
    assert "after a prompt of 60 tokens, a log-probability is no number; the usual suspects" in str(found)


def test_a_stop_ends_it(serve, model):
    server = serve()
    server.hold = []
    (found,) = ask([server], scorer(model), stop=lambda: bool(server.hold))
    assert found.unanswered == "6 of 6 requests: given up"


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda asked: [[0.0]] * len(asked), r"score returns \[1, 1.*for sequences of \[8, 8"),
        (lambda asked: [], r"score returns \[\]"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(serve, score, said):
    with pytest.raises(ValueError, match=said):
        ask([serve()], score)


def test_what_is_asked_is_bounded(model):
    with pytest.raises(ValueError, match="17 prompts to compare by: 1 to 16 are allowed"):
        ask([], scorer(model), lengths=[4] * 17)
    with pytest.raises(ValueError, match="none of them empty"):
        ask([], scorer(model), lengths=[4, 0])
    with pytest.raises(ValueError, match="without top-p"):
        ask([], scorer(model), sampling=Sampling(top_p=0.9))


# --- a publisher of one's own -----------------------------------------------------------------------------------------


@pytest.fixture
def own(bus_endpoint, model):
    """A publisher with one generator, whose answers come from `serve`."""
    opened = []

    def start(server):
        listener = Listener(bus_endpoint, BusConfig())
        publisher = Publisher(WeightSource(model, "float32"), listener, QUICK, version=0, ranks={"g0": 1})
        server.generator = FakeGenerator(bus_endpoint, url=server.url).start()
        opened.extend([publisher.close, server.generator.close, listener.close])
        publisher.wait_joined(20)
        return publisher

    yield start
    for close in opened:
        close()


def test_an_own_trainer_compares_through_its_publisher(own, serve, model):
    publisher = own(serve())
    for version in (0, 1):
        (found,) = publisher.compare(scorer(model), prompts(4, 4, 30, 30))
        assert (found.generator, found.version, found.shown) == ("g0", version, True)
        publisher.publish(version + 1)
        publisher.flush(20)
    with pytest.raises(
        NumbersDiffer, match=r"g0 does not compute what the trainer does, at version 2: .* nats.*suspects"
    ):
        publisher.compare(scorer(model, temperature=0.8), prompts(4, 4, 30, 30))


def test_a_users_trainer_without_generators_is_reported(own, serve, model):
    publisher = own(server := serve())
    server.generator.close()
    eventually(lambda: publisher.states["g0"][0] is ReplicaState.ABSENT)
    with pytest.raises(NumbersDiffer, match="no generator holds the trainer's version"):
        publisher.compare(scorer(model), prompts(4))


def test_a_refused_generator_does_not_come_back(own, serve):
    publisher = own(server := serve())
    incarnation = publisher.served["g0"].incarnation
    publisher.refuse("g0", "another", "no reason")
    assert "g0" in publisher.served
    publisher.refuse("g0", incarnation, "other numbers")
    assert publisher.served == {}
    eventually(lambda: Refused(reason="other numbers") in server.generator.heard, "the engine hearing of it")


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_run(tmp_path, serve):
    runs = []

    def make(count=1, **trainer):
        run = Run(tmp_path, **({"steps": 3, "compare_start": "refuse", "autocast": False} | trainer))
        run.config = dataclasses.replace(
            run.config,
            model=dataclasses.replace(run.config.model, dtype="float32"),
            generator=dataclasses.replace(run.config.generator, count=count),
        )
        run.save()
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()


def test_a_run_compares_before_its_first_step_and_after_the_first_swap(make_run, serve):
    run = make_run().start(server=(server := serve()))
    assert train(run) == 0
    told = [line.get("compared") for line in run.lines()]
    assert [each and {name: figures["version"] for name, figures in each.items()} for each in told] == [
        {"g0": 0},
        {"g0": 1},
        None,
    ]
    assert all(figures["agrees"] and figures["tokens"] == REQUESTS * 8 for figures in (told[0]["g0"], told[1]["g0"]))
    assert len(server.requests) == 2 * REQUESTS


def test_a_run_whose_generator_computes_something_else_is_refused_before_its_first_step(make_run, serve, capfd):
    run = make_run().start(server=serve(change=window))
    assert train(run) == 1
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(
        "inflight trainer: g0 does not compute what the trainer does, at version 0: after prompts of "
    )
    assert said.endswith(SUSPECTS)
    assert run.lines() == []


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_it_may_be_warned_of_or_left_out(make_run, serve, mode, caplog):
    run = make_run(compare_start=mode).start(server=(server := serve(change=window)))
    assert train(run) == 0
    warned = [each.message for each in caplog.records if "does not compute what the trainer does" in each.message]
    assert len(warned) == (2 if mode == "warn" else 0)
    assert len(server.requests) == (2 * REQUESTS if mode == "warn" else 0)
    assert [line["compared"]["g0"]["agrees"] for line in run.lines() if "compared" in line] == [False] * len(warned)


def test_a_generator_that_is_swapped_wrong_is_done_without(make_run, serve, capfd):
    """The comparison after the first swap: the only generator is refused, which ends the run."""
    server = serve()
    server.change = lambda ids, logits: logits if server.generator.version == 0 else window(ids, logits)
    run = make_run().start(server=server)
    assert train(run) == 1
    assert len(run.lines()) == 1
    assert [each.name for each in (run.folder / "checkpoints").iterdir()] == ["step-000001"]
    assert "at version 1: after prompts of" in capfd.readouterr().err
    assert any(isinstance(each, Refused) for each in run.generator.heard)


def test_a_generator_that_joins_with_other_numbers_costs_itself_alone(make_run, serve):
    run = make_run(count=2, steps=30, groups_per_step=1).start(server=serve())
    wrong = serve(change=window)

    def join():
        eventually(lambda: len(run.lines()) > 2, "training")
        wrong.generator = FakeGenerator(run.config.endpoint("weights"), "g1", url=wrong.url).start()
        run.others.append(wrong.generator)

    with run.beside(join):
        assert train(run) == 0
    told = [line["compared"] for line in run.lines() if "compared" in line]
    assert {name: figures["agrees"] for each in told for name, figures in each.items()} == {"g0": True, "g1": False}
    assert any(isinstance(each, Refused) for each in wrong.generator.heard)


def test_generators_that_do_not_answer_end_the_run_in_time_and_are_named(make_run, serve, capfd, monkeypatch):
    server = serve()
    server.hold = []
    monkeypatch.setattr(starts, "ANSWER_S", 0.3)
    run = make_run()
    object.__setattr__(run.config.publish, "join_timeout_s", 2.0)
    run.save()
    run.start(server=server)
    assert train(run) == 1
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert "no generator was compared with the trainer within 2 s: g0 could not be compared" in said


def test_prompts_reach_beyond_what_the_model_draws_a_line_at():
    lengths = {len(each) for each in prompts_for(MistralConfig(sliding_window=32, vocab_size=50), 512, 0)}
    assert lengths == {4, 24, 64, 504}
    dynamic = LlamaConfig(
        max_position_embeddings=64,
        vocab_size=50,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    )
    found = prompts_for(dynamic, 256, 0)
    assert {len(each) for each in found} == {4, 24, 128, 248}
    assert len(found) == REQUESTS
    assert max(max(each) for each in found) < 50
    assert {len(each) for each in prompts_for(LlamaConfig(vocab_size=50), 12, 0)} == {4}
    assert prompts_for(dynamic, 256, 0) == found
    assert edges(MistralConfig(sliding_window=None, max_position_embeddings=0)) == []


def test_modes_are_checked():
    with pytest.raises(ConfigError, match=r"trainer\.compare_start='no' is not allowed: refuse, warn, off"):
        TrainerConfig(compare_start="no")
    with pytest.raises(ConfigError, match=r"trainer\.compare_lag_0='refuse' is not allowed: warn, stop, off"):
        TrainerConfig(compare_lag_0="refuse")
