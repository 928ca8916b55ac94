"""The engine's agent against a real bus and a fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from inflight.bus import Link, Listener, PeerLost, Received
from inflight.config import BusConfig
from inflight.generator.agent import Commits, EngineAgent, GeneratorEnded
from inflight.messages import AnyMessage, Commit, Committed, EngineHello, Enquire, Failed, Finish, Ready, Refused

FINISH = Finish(reason="done")
LIMIT_S = 20.0
BUS = BusConfig(heartbeat_s=0.05, dead_after_s=LIMIT_S)
QUICK = BusConfig(heartbeat_s=0.05, dead_after_s=0.5)
"""For silence that is waited for."""
HELLO = EngineHello(generator="g0", world_size=2, version=3, url="http://127.0.0.1:1")


class FakeEngine:
    """An engine core that answers commit_weights with what a test wants."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []
        self.engine_core = SimpleNamespace(call_utility_async=self._call)
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 5)

    async def _call(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is None:
            await asyncio.sleep(60)
        return self.answer


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with Listener(f"ipc://{tmp_path}/w", BUS) as listener:
        yield listener


def converse(
    listener: Listener, answer: Any, *sent: AnyMessage, adapter: int = 0
) -> tuple[list[AnyMessage], str, EngineAgent]:
    """Sends messages once the agent has said hello; returns its replies, why it ended, and the agent."""

    async def talk(link: Link) -> str:
        run = asyncio.create_task(agent.run())
        got = await asyncio.to_thread(listener.receive, LIMIT_S)
        assert isinstance(got, Received)
        assert (got.peer, got.message) == ("g0.engine", HELLO)
        for message in sent:
            listener.send("g0.engine", message)
        try:
            async with asyncio.timeout(LIMIT_S):
                await run
        except GeneratorEnded as ended:
            return str(ended)
        return ""

    with Link(listener.endpoint, "g0.engine", BUS) as link:
        agent = EngineAgent(link, FakeEngine(answer), HELLO, commit_timeout_s=0.3, adapter=adapter)
        why = asyncio.run(talk(link))
    replies = []
    while isinstance(got := listener.receive(LIMIT_S), Received):  # until its goodbye
        replies.append(got.message)
    return replies, why, agent


def test_commits_in_order_and_tells_the_longest_gap(listener: Listener) -> None:
    ranks = [{"gap_s": 0.001}, {"gap_s": 0.004}]
    replies, why, agent = converse(listener, ranks, Commit(version=4), Commit(version=6), Finish(reason="done"))
    assert replies == [Committed(version=v, gap_s=0.004, running=5) for v in (4, 6)]
    assert why == ""
    assert agent.engine.asked == [("commit_weights", 4), ("commit_weights", 6)]
    assert (agent.commits.version, agent.commits.swaps, agent.commits.max_gap_s) == (6, 2, 0.004)


def test_a_version_that_is_not_newer_is_refused_without_asking_the_engine(listener: Listener) -> None:
    replies, why, agent = converse(listener, [{"gap_s": 0.0}], Commit(version=3, attempt=7), Finish(reason="done"))
    assert [type(reply) for reply in replies] == [Failed]
    assert (replies[0].phase, replies[0].attempt, replies[0].poisoned) == ("commit", 7, False)
    assert agent.engine.asked == []
    assert why == ""


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (RuntimeError("rank 1 has no shadow\nat line 2"), "RuntimeError: rank 1 has no shadow"),
        (
            [{"gap_s": 0.001}, {"error": "SwapRefused: version 4 is not ready"}],
            "rank 1: SwapRefused: version 4 is not ready",
        ),
        (None, "no answer in 0 s"),
    ],
)
def test_a_commit_that_goes_wrong_poisons_and_ends_the_generator(listener: Listener, answer: Any, says: str) -> None:
    replies, why, agent = converse(listener, answer, Commit(version=4), Commit(version=5))
    assert replies == [Failed(version=4, phase="commit", reason=says, poisoned=True)]
    assert why == f"version 4 could not be committed: {says}"
    assert agent.commits.version == 3


def test_a_repeated_commit_is_answered_and_done_once(listener: Listener) -> None:
    commit = Commit(version=4, attempt=9)
    again = (commit, commit, Enquire(), Finish(reason="done"))
    replies, _, agent = converse(listener, [{"gap_s": 0.001}], *again)
    assert replies == [
        *[Committed(version=4, attempt=9, gap_s=0.001, running=5)] * 2,
        msgspec.structs.replace(HELLO, version=4),
    ]
    assert agent.engine.asked == [("commit_weights", 4)]


OTHER = "f" * 16


def test_a_restarted_publisher_swaps_under_the_number_that_is_stamped(listener: Listener) -> None:
    """The engine core would refuse to stamp it once more; and of the weights before no KV may stay."""
    again = Commit(version=4, publisher=OTHER)
    replies, why, agent = converse(listener, [{"gap_s": 0.001}], Commit(version=4), again, again, Enquire(), FINISH)
    assert why == ""
    assert agent.engine.asked == [
        ("commit_weights", 4),
        ("collective_rpc", "commit_weights", None, (4,)),
        ("reset_prefix_cache", True),
    ]
    answer = Committed(version=4, gap_s=0.001, running=5)
    other = msgspec.structs.replace(answer, publisher=OTHER)
    assert replies == [answer, other, other, msgspec.structs.replace(HELLO, version=4, publisher=OTHER)]


def test_a_publisher_of_an_adapter_commits_versions_of_that_adapter(listener: Listener) -> None:
    again = Commit(version=4, publisher=OTHER)
    replies, why, agent = converse(listener, [{"gap_s": 0.001}], Commit(version=4), again, FINISH, adapter=77)
    assert why == ""
    assert agent.engine.asked == [
        ("commit_weights", 4, 77),
        ("collective_rpc", "commit_weights", None, (4, 77)),
        ("reset_prefix_cache", True),
    ]
    assert [reply.version for reply in replies] == [4, 4]


def test_a_publisher_restarted_at_a_lower_number_is_refused(listener: Listener) -> None:
    replies, _, agent = converse(listener, [], Commit(version=2, publisher=OTHER), FINISH)
    assert [(reply.phase, reply.poisoned) for reply in replies if isinstance(reply, Failed)] == [("commit", False)]
    assert agent.engine.asked == []


def test_an_engine_that_was_sent_nothing_commits_any_first_version(listener: Listener) -> None:
    for first in (0, 7):
        commits, core = Commits(None, ""), FakeEngine([{"gap_s": 0.0}])
        sent: list[AnyMessage] = []
        link: Any = SimpleNamespace(send=sent.append)
        agent = EngineAgent(link, core, msgspec.structs.replace(HELLO, version=None), commit_timeout_s=1)
        assert agent.commits == commits
        asyncio.run(agent._obey(Commit(version=first, publisher=OTHER)))
        assert core.asked == [("commit_weights", first)]
        assert (agent.commits.version, agent.commits.publisher) == (first, OTHER)


def test_a_refusal_ends_the_generator(listener: Listener) -> None:
    _, why, _ = converse(listener, [], Refused(reason="g0 is not of this run"))
    assert why == "the trainer refuses g0: g0 is not of this run"


def test_a_message_that_is_not_for_engines_ends_the_generator(listener: Listener) -> None:
    _, why, _ = converse(listener, [], Ready(version=4, attempt=1, digest="0" * 64, receive_s=0.0, build_s=0.0))
    assert why == "the trainer sent Ready to an engine"


async def until(condition: Callable[[], object]) -> None:
    """Nothing tells of a heartbeat."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_trainer_that_comes_back_finds_the_generator_serving(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/w"
    listener = Listener(endpoint, QUICK)

    async def talk(link: Link) -> None:
        agent = EngineAgent(link, FakeEngine([]), HELLO, commit_timeout_s=1, alone_timeout_s=60)
        run = asyncio.create_task(agent.run())
        assert await asyncio.to_thread(listener.receive, LIMIT_S) is not None
        await until(lambda: link.listener)
        listener.close()
        await asyncio.sleep(1.0)
        assert not run.done()
        with Listener(endpoint, BUS) as again:
            await until(lambda: "g0.engine" in again.peers())
            again.send("g0.engine", Enquire())
            got = await asyncio.to_thread(again.receive, LIMIT_S)
            assert isinstance(got, Received)
            assert got.message == HELLO
            again.send("g0.engine", Finish(reason="done"))
            await asyncio.wait_for(run, LIMIT_S)

    with Link(endpoint, "g0.engine", QUICK) as link:
        asyncio.run(talk(link))


def test_a_trainer_that_is_heard_again_is_not_held_to_an_earlier_silence() -> None:
    """Two short silences, and between them heartbeats alone, which are no messages."""
    script: list[Any] = [PeerLost("silent"), *[None] * 4, PeerLost("silent again"), Finish(reason="done")]

    def receive(timeout_s: float) -> AnyMessage | None:
        time.sleep(0.05)
        if isinstance(event := script.pop(0), PeerLost):
            raise event
        return event

    link: Any = SimpleNamespace(send=lambda message: None, receive=receive)
    asyncio.run(EngineAgent(link, FakeEngine([]), HELLO, commit_timeout_s=1, alone_timeout_s=0.15).run())
    assert script == []


def test_silence_ends_the_generator(tmp_path: Path) -> None:
    listener = Listener(f"ipc://{tmp_path}/w", QUICK)

    async def talk(link: Link) -> None:
        agent = EngineAgent(link, FakeEngine([]), HELLO, commit_timeout_s=1)
        run = asyncio.create_task(agent.run())
        assert await asyncio.to_thread(listener.receive, LIMIT_S) is not None
        await until(lambda: link.listener)
        listener.close()
        with pytest.raises(GeneratorEnded, match="the trainer is gone: "):
            await run

    with Link(listener.endpoint, "g0.engine", QUICK) as link:
        asyncio.run(talk(link))
