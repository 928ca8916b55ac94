"""Samples over real sockets: streams that end early, that stall, that lie; and who continues them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
from dataclasses import dataclass

import aiohttp
import pytest
from openai_server import Server, Tokens, choice, chunk
from packed_samples import packed

from inflight.actor import __main__ as entry
from inflight.actor import pool as pool_module
from inflight.actor.answers import Answers
from inflight.actor.continuation import rest_of
from inflight.actor.pool import Pool
from inflight.completions import Rejected, RetryableFailure, lost, sampling
from inflight.config import RolloutConfig
from inflight.types import GeneratorSpan, VersionSpan

PROMPT = [1, 2, 3]
DONE = "[DONE]"
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.02)


async def decoded(token_ids):
    return Tokens().decode(token_ids)


@dataclass
class Room:
    """Servers g0, g1, …, and the client that sends them requests."""

    servers: list[Server]
    pool: Pool
    answers: Answers

    async def ask(self, seed=7):
        answer = self.answers.begin(PROMPT)
        return answer, await asyncio.wait_for(self.answers.finish(answer, PROMPT, seed), LIMIT_S)


@contextlib.asynccontextmanager
async def room(*scripts, silence_s=20.0, most=64, **config):
    """A server for each list of answers; one that has none left never answers."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server(lambda: asyncio.sleep(3600))) for _ in scripts]
        for server, script in zip(servers, scripts, strict=True):
            server.answers = list(script)
        urls = {f"g{number}": server.url for number, server in enumerate(servers)}
        session = await stack.enter_async_context(aiohttp.ClientSession())
        pool = await stack.enter_async_context(Pool(session, list(urls), urls.__getitem__, most=most))
        request = sampling(RolloutConfig(**{"max_tokens": 8} | config), Tokens.size)
        answers = Answers(session, pool, request, silence_s=silence_s, decode=decoded)
        async with asyncio.timeout(LIMIT_S):
            while not all(generator.up for generator in pool.generators.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield Room(servers, pool, answers)


def play(scene, *scripts, **kwargs):
    async def main():
        async with room(*scripts, **kwargs) as there:
            return await scene(there)

    return asyncio.run(main())


def text_of(turn):
    return Tokens().decode(turn.token_ids)


def test_a_lost_generators_tokens_are_continued_by_another_one():
    async def scene(there):
        answer, turn = await there.ask()
        assert text_of(turn) == "01234"
        assert turn.token_versions == [VersionSpan(0, 4), VersionSpan(3, 2)]
        assert turn.finish_reason == "stop"
        assert (answer.generator, answer.pieces) == ("g1", [GeneratorSpan(0, "g0"), GeneratorSpan(3, "g1")])
        assert answer.retries == {"connection lost": 1}
        assert 0 < answer.first_token_s < LIMIT_S
        (first,), (second,) = [server.requests for server in there.servers]
        assert second == rest_of(first, [0, 1, 2])
        assert second["prompt"] == [*PROMPT, 0, 1, 2]
        assert second["max_tokens"] == 5
        assert not there.pool.generators["g0"].up or there.pool.generators["g0"].load == 0
        assert (there.answers.continued, there.answers.tokens) == (1, 5)

    dies = [chunk("0", version=4), chunk("12", 1, version=4), None]
    play(scene, [dies], [[chunk("34", version=2, finish="stop"), DONE]])


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ([], "connection lost"),
        ([DONE], "aborted"),
        ([chunk("", 2, finish="abort"), DONE], "aborted"),
        ([json.dumps({"error": {"message": "engine died", "type": "x", "code": 500}}), DONE], "http 500"),
    ],
)
def test_other_ends_before_the_end(ending, reason):
    async def scene(there):
        answer, turn = await there.ask()
        assert text_of(turn) == "0123"
        assert answer.retries == {reason: 1}
        assert there.answers.continued == 1

    play(scene, [[chunk("01"), *ending]], [[chunk("23", finish="length"), DONE]])


@pytest.mark.parametrize(
    "nonsense",
    [
        "{",
        json.dumps({"choices": [chunk("2", 2), chunk("2", 2)]}),
        chunk("2", 7),
        chunk("2", 2) | {"packed_logprobs": packed([-1])},
        chunk("0123456", 2),
    ],
)
def test_tokens_of_a_server_that_talks_nonsense_are_not_continued(nonsense):
    async def scene(there):
        answer, turn = await there.ask()
        assert text_of(turn) == "99"
        assert answer.pieces == []
        assert answer.retries == {"malformed answer": 1}
        assert there.servers[1].requests == there.servers[0].requests

    play(scene, [[chunk("01"), nonsense, DONE]], [[chunk("99", finish="stop"), DONE]])


def test_a_log_probability_that_is_no_number_is_not_asked_for_again():
    """The same seed under the same weights would give it again."""

    async def scene(there):
        with pytest.raises(Rejected) as error:
            await there.ask()
        assert error.value.reason == "log-probability not finite"
        assert [len(server.requests) for server in there.servers] == [1, 0]

    play(scene, [[chunk("01"), chunk("2", 2, packed_logprobs=packed([2], [float("nan")]))]], [])


def test_a_sequence_that_can_not_be_continued_is_restarted_and_counted():
    async def scene(there):
        answer, turn = await there.ask()
        assert (text_of(turn), answer.pieces) == ("45", [])
        assert answer.retries == {"connection lost": 1, "started anew": 1}
        assert there.servers[1].requests == there.servers[0].requests
        assert there.answers.continued == 0

    play(scene, [[chunk("01"), None]], [[chunk("45", finish="stop"), DONE]], presence_penalty=0.5)


def test_a_stop_string_across_the_seam_ends_the_sequence():
    async def scene(there):
        answer, turn = await there.ask()
        assert (text_of(turn), turn.finish_reason) == ("01=\n", "stop")
        assert answer.pieces == [GeneratorSpan(0, "g0"), GeneratorSpan(3, "g1")]

    play(scene, [[chunk("01="), None]], [[chunk("\n5"), chunk("6", 2), DONE]], stop=["=\n"])


def test_no_answer_is_too_long_while_tokens_come():
    """One stream takes several times the bound, and so does one that waits in the queue behind it."""

    async def scene(there):
        ended = asyncio.Event()

        async def queued():
            await ended.wait()
            return choice("9")

        slow = [step for start in range(8) for step in (chunk("0", start), lambda: asyncio.sleep(0.3))]
        slow[-2] = chunk("0", 7, finish="length")

        async def end():
            ended.set()

        there.servers[0].answers = [[*slow, end, DONE], queued]
        (_, turn), (other, _) = await asyncio.gather(there.ask(1), there.ask(2))
        assert text_of(turn) == "0" * 8
        assert other.retries == {}
        assert len(there.servers[0].requests) == 2

    play(scene, [], silence_s=1.0)


def test_a_stream_that_stalls_while_others_are_served_is_continued():
    async def scene(there):
        served = [asyncio.create_task(there.ask(seed)) for seed in (1, 2)]
        async with asyncio.timeout(LIMIT_S):
            while not all(server.active for server in there.servers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        answer, turn = await there.ask(3)
        assert text_of(turn) == "015"
        assert answer.retries == {"stalled": 1}
        assert there.pool.generators["g0"].up, "it serves others"
        for each in served:
            each.cancel()

    busy = [step for start in range(100) for step in (chunk("0", start), lambda: asyncio.sleep(0.1))]
    stalls = [chunk("01"), lambda: asyncio.sleep(3600)]
    play(scene, [busy, stalls], [busy, [chunk("5", finish="stop"), DONE]], silence_s=1.0, max_tokens=100)


def test_a_generator_that_is_silent_to_all_is_left_alone_and_its_sequences_are_continued():
    async def scene(there):
        there.servers[0].health = 500
        answer, turn = await there.ask()
        assert text_of(turn) == "015"
        assert answer.retries == {"generator silent": 1}
        assert not there.pool.generators["g0"].up

    silent = [chunk("01"), lambda: asyncio.sleep(3600)]
    play(scene, [silent], [[chunk("5", finish="stop"), DONE]], silence_s=0.5)


def test_attempts_that_bring_tokens_are_not_numbered_but_those_that_bring_none_are():
    async def scene(there):
        answer, turn = await there.ask()
        assert text_of(turn) == "01234567"
        assert answer.retries == {"http 500": 7 * 2, "connection lost": 7}
        with pytest.raises(RetryableFailure, match="http 500"):
            await there.ask()

    pieces = [each for digit in "0123456" for each in (500, 500, [chunk(digit), None])]
    play(scene, [*pieces, [chunk("7", finish="length"), DONE], 500, 500, 500])


def test_the_first_event_of_a_long_prompt():
    """It holds the prompt's ids: more than a line may have by aiohttp's own limit."""

    async def scene(there):
        _, turn = await there.ask()
        assert text_of(turn) == "01"

    play(scene, [[chunk("0", prompt_token_ids=list(range(200_000))), chunk("1", 1, finish="stop"), DONE]])


def test_no_more_connections_are_open_than_may_be():
    gate = asyncio.Event()

    async def held():
        await gate.wait()
        return choice("9")

    async def scene(there):
        asked = asyncio.gather(*(there.ask(seed) for seed in range(20)))
        async with asyncio.timeout(LIMIT_S):
            while there.servers[0].active < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        gate.set()
        await asked
        assert there.servers[0].most_active == 3

    play(scene, [held] * 20, most=3)


def test_too_many_open_files_are_no_fault_of_the_generator():
    async def scene():
        async with aiohttp.ClientSession() as session:
            pool = Pool(session, ["g0"], lambda name: "")
            generator = pool.generators["g0"]
            generator.url, generator.up = "http://127.0.0.1:9", True
            answers = Answers(session, pool, sampling(RolloutConfig(), 17), silence_s=LIMIT_S, decode=Tokens().decode)
            with no_file_left(), pytest.raises(RetryableFailure, match="ulimit -n") as error:
                await answers.finish(answers.begin(PROMPT), PROMPT, 7)
            assert error.value.reason == "too many open files"
            assert generator.up

    asyncio.run(scene())
    assert lost(OSError(errno.ECONNREFUSED, "no"), "g0").down


@contextlib.contextmanager
def no_file_left():
    """This process may open no file more."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("soft", "most"), [(256, 128), (4, 8), (1 << 30, 1 << 16), (resource.RLIM_INFINITY, 1 << 16)])
def test_half_of_the_files_are_for_connections(monkeypatch, soft, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert entry.connections() == most
