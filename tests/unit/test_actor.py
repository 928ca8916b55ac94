"""The actor between a real HTTP server and a real buffer: every started group is delivered or counted."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest
from fake_generator import eventually
from in_process import in_process
from openai_server import Server, Tokens, choice
from packed_samples import framed, packed
from rollout_samples import make_config

from inflight import config as configuration
from inflight import messages
from inflight.actor import __main__ as entry
from inflight.actor import loop as actor_module
from inflight.actor import pool as pool_module
from inflight.actor import streak as streak_module
from inflight.actor.called import GroupLost
from inflight.actor.loop import Actor, ActorError
from inflight.actor.pool import NoGenerator, Pool
from inflight.actor.sampler import Sampler
from inflight.bus import Link, Listener, PeerLost
from inflight.config import TaskConfig
from inflight.messages import ActorBye, ActorHello, Finish, Grant, GroupAck, GroupDone, GroupFailed, Refused, Status
from inflight.rollout import ledger as ledger_module
from inflight.rollout.buffer import Buffer
from inflight.tasks.addition import Addition
from inflight.types import FIRST_FAILED, Route, Routes

LIMIT_S = 90.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(actor_module, "TICK_S", 0.05)
    monkeypatch.setattr(streak_module, "MAX_PAUSE_S", 0.05)


class Room:
    """Everything around one actor: servers g0, g1, …, a buffer over the bus, the actor itself."""

    def __init__(self, tmp_path, servers, task=None, **kwargs):
        self.routing = kwargs.pop("routing", {})
        rewards = kwargs.pop("rewards", [])
        self.config = replace(make_config(tmp_path, **kwargs), rewards=rewards)
        (tmp_path / "bus").mkdir()
        self.path = tmp_path
        self.servers = servers
        self.urls = {f"g{number}": server.url for number, server in enumerate(servers)}
        self.task = task or Addition(seed=0)
        limit_s = self.config.rollout.reward_timeout_s
        self.code = in_process(self.task, Tokens(), limit_s, rewards=rewards)

    def url_of(self, name):
        if self.urls[name] is None:
            raise FileNotFoundError(name)
        return self.urls[name]

    @contextlib.asynccontextmanager
    async def open(self, link=None):
        with contextlib.ExitStack() as stack:
            if link is None:
                listener = stack.enter_context(Listener(self.config.endpoint("rollouts"), self.config.bus))
                self.listener = listener
                self.buffer = stack.enter_context(Buffer(listener, self.config))
                link = stack.enter_context(Link(self.config.endpoint("rollouts"), "a0", self.config.bus))
            async with aiohttp.ClientSession() as session, Pool(session, list(self.urls), self.url_of) as self.pool:
                room = self.config.longest_prompt
                seed = self.config.request_seed
                routing = self.routing | {"longest_prompt": room}
                self.sampler = Sampler(self.config.rollout, seed, self.code, session, self.pool, **routing)
                self.actor = Actor(
                    "a0",
                    link,
                    self.sampler,
                    concurrency=self.config.rollout.concurrency,
                    give_up_after_s=self.config.rollout.give_up_after_s,
                )
                await self.until(lambda: all(generator.up for generator in self.pool.generators.values()))
                self.running = asyncio.create_task(self.actor.run())
                try:
                    yield self
                finally:
                    self.running.cancel()
                    await asyncio.gather(self.running, return_exceptions=True)

    async def take(self, groups=2, version=0):
        return await asyncio.to_thread(self.buffer.take, groups, version, LIMIT_S)

    async def finish(self):
        settled = await asyncio.to_thread(self.buffer.finish, "enough", LIMIT_S)
        assert settled
        return await asyncio.wait_for(self.running, LIMIT_S)

    async def until(self, condition):
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - conditions of all kinds
                await asyncio.sleep(0.01)

    async def failed(self, reason):
        await self.until(lambda: reason in self.buffer.counts().failed)
        self.buffer.counts().check()


@pytest.fixture
def play(tmp_path):
    """Runs `scene(room)` with servers, bus, buffer and actor around it; gives the room back."""

    def run(scene, *, servers=1, default=None, others=None, answers=(), **kwargs):
        async def main():
            async with contextlib.AsyncExitStack() as stack:
                all_servers = [
                    await stack.enter_async_context(Server(others if others and number else default))
                    for number in range(servers)
                ]
                all_servers[0].answers = list(answers)
                async with Room(tmp_path, all_servers, **kwargs).open() as room:
                    await scene(room)
                    return room

        return asyncio.run(main())

    return run


class Known(Addition):
    """Says how many questions there are."""

    def __len__(self):
        return 100


@pytest.mark.parametrize(("kind", "questions"), [(Known, 100), (Addition, None)])
def test_the_number_of_questions_is_reported_where_it_is_known(play, kind, questions):
    async def scene(room):
        assert room.actor.status().get("questions") == questions

    play(scene, task=kind(seed=0))


def test_groups_from_question_to_batch_and_to_the_end(play):
    async def scene(room):
        batch = await room.take(2, version=3)
        assert await room.finish() == "enough"
        (requests,) = [server.requests for server in room.servers]
        for gated in batch:
            group = gated.group
            item = next(i for i in map(room.task.item, range(10)) if i.key == group.prompt_key)
            for number, rollout in enumerate(group.rollouts):
                assert rollout.rollout_id == f"{group.group_id}/{number}"
                assert rollout.prompt_ids == Tokens().encode(item.prompt)
                assert Tokens().decode(rollout.turn.token_ids) == "07"
                assert rollout.reward == await room.task.score(item, "07")
                assert [(span.start, span.version) for span in rollout.turn.token_versions] == [(0, 3)]
                assert (rollout.generator, rollout.turn.finish_reason) == ("g0", "stop")
                assert rollout.started <= rollout.finished
        assert len({request["seed"] for request in requests}) == len(requests), "a seed a sample"
        wanted = {
            "n": 1,
            "logprobs": 0,
            "return_packed_logprobs": True,
            "stream": True,
            "temperature": 1.0,
            "top_p": 1.0,
        }
        assert all(request.items() >= wanted.items() for request in requests)
        assert room.pool.generators["g0"].version == 3

    room = play(scene, default=lambda: choice(version=3))
    counts = room.buffer.counts()
    counts.check()
    assert counts.trained == 2
    assert counts.in_flight == 0
    assert set(counts.failed) <= {"run finished"}
    assert room.actor.started == counts.granted == room.actor.done + room.actor.failed


def test_no_more_is_in_flight_than_concurrency_allows_and_capacity_grants(play):
    async def scene(room):
        gate = asyncio.Event()

        async def held():
            await gate.wait()
            return choice()

        room.servers[0].default = held
        await room.until(lambda: room.servers[0].active == 6)
        assert room.actor.in_flight == 3
        gate.set()
        await room.until(lambda: room.buffer.counts().buffered == 4)
        await asyncio.sleep(0.2)
        assert room.servers[0].most_active <= 6
        assert (room.actor.started, room.actor.in_flight) == (4, 0), "a full buffer stops the actor"

    play(scene, concurrency=3, max_lag=1, step=2, default=lambda: asyncio.sleep(0.3, choice()))


@pytest.mark.parametrize("answer", [500, 503, 429, None, "cut", "two", "untagged tokens"])
def test_a_failed_request_is_asked_of_another_generator(play, answer):
    answers = {
        "cut": choice(packed_logprobs=packed([0, 7])[:-4]),
        "two": choice(token_versions=[[1, 0]]),
        "untagged tokens": choice(token_versions=[]),
    }

    async def scene(room):
        first, other = room.servers
        await room.take(2)
        seed = first.requests[0]["seed"]
        assert seed in [request["seed"] for request in other.requests], "although the other had more to do"
        assert room.sampler.answers.retries == 1
        assert room.buffer.counts().failed == {}

    play(
        scene,
        servers=2,
        concurrency=1,
        answers=[answers.get(answer, answer)],
        others=lambda: asyncio.sleep(0.1, choice()),
    )


def test_a_generator_that_comes_back_elsewhere_is_used_again(play):
    async def scene(room):
        await room.take(2)
        async with Server() as moved:
            room.servers[0].health = 503
            room.servers[0].default = lambda: 503
            room.urls["g0"] = moved.url
            batch = await room.take(2) + await room.take(2)
            assert moved.requests
            assert batch[-1].rollouts[0].rollout.generator == "g0"
        assert room.buffer.counts().failed == {}

    play(scene)


def test_aborted_requests_are_counted_and_retried(play):
    async def scene(room):
        batch = await room.take(2)
        assert room.sampler.answers.aborted == 2
        assert room.buffer.counts().failed == {}
        # Each is recorded in the sample that was retried, which is all that a run's summary has of it.
        told = [rollout.rollout.retries for group in batch for rollout in group.rollouts]
        assert sum(each.get("aborted", 0) for each in told) == 2
        assert sum(map(bool, told)) in (1, 2)

    play(scene, answers=[choice("", finish_reason="abort")] * 2)


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        (choice("", finish_reason="abort"), "aborted", 6),
        (500, "http 500", 6),
        (400, "http 400", 1),
        (401, "http 401", 6),
        (choice(packed_logprobs=framed([1, 1], [(1, -0.5)])), "malformed answer", 6),
        (choice(packed_logprobs=packed([-1, 2])), "malformed answer", 6),
    ],
)
def test_a_group_is_given_up_with_a_reason_and_the_actor_continues(play, monkeypatch, answer, reason, requests):
    """A question that is not at fault is re-queued, with the same seeds, but not without end."""
    monkeypatch.setattr(ledger_module, "MAX_TRIES", 2)

    async def scene(room):
        def fail_the_first_seed():
            seeds = [request["seed"] for request in room.servers[0].requests]
            return answer if seeds[-1] == seeds[0] else choice()

        room.servers[0].default = fail_the_first_seed
        await room.failed(reason)
        tries = 1 if requests == 1 else 2
        await room.until(lambda: room.buffer.counts().failed == {reason: tries})
        seeds = [request["seed"] for request in room.servers[0].requests]
        assert seeds.count(seeds[0]) == requests
        assert len(await room.take(2)) == 2
        assert (await room.finish()) == "enough"

    play(scene)


def test_what_is_too_old_is_sampled_again_with_the_same_seeds(play):
    """Over the wire: under a name of its own, which says that it is the second answer."""

    async def scene(room):
        server = room.servers[0]
        server.default = lambda: choice(token_versions=[[0, int(len(server.requests) > 4)]])
        taken = await room.take(2, version=1)
        assert [gated.group.group_id for gated in taken] == ["q0.1", "q1.1"]
        assert [member.rollout_id for member in taken[0].group.rollouts] == ["q0.1/0", "q0.1/1"]
        seeds = [request["seed"] for request in server.requests]
        assert sorted(seeds[:4]) == sorted(seeds[4:8])
        counts = room.buffer.counts()
        counts.check()
        assert counts.dropped == {"too old, to be sampled again": 2}
        assert (await room.finish()) == "enough"

    play(scene, max_lag=0, max_token_lag=0, steps=1)


def test_an_unpatched_server_ends_the_actor_at_once(play):
    async def scene(room):
        with pytest.raises(ActorError, match=r"g0 answers without token_versions.*not patched"):
            await asyncio.wait_for(room.running, LIMIT_S)
        await room.until(lambda: room.buffer.counts().in_flight == 0)
        counts = room.buffer.counts()
        counts.check()
        assert counts.failed == {"actor stopped": counts.granted}

    untagged = choice()
    del untagged["token_versions"], untagged["prefill_versions"]
    play(scene, default=lambda: untagged)


class Moody(Addition):
    """Scores by the completion's first character."""

    async def score(self, item, completion):
        match completion[0]:
            case "1":
                await asyncio.sleep(60)
            case "2":
                raise ZeroDivisionError("oh")
            case "3":
                return float("nan")
            case "4":
                raise TimeoutError("its own")
            case "5":
                return 1e39  # float32 holds no such number
        return 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1", "reward timeout"),
        ("2", "reward error: ZeroDivisionError"),
        ("3", "reward error: not finite"),
        ("4", "reward error: TimeoutError"),
        ("5", "reward error: not finite"),
    ],
)
def test_a_reward_that_fails_is_counted_and_never_zero(play, text, reason):
    async def scene(room):
        await room.failed(reason)
        batch = await room.take(2)
        assert {rollout.reward for gated in batch for rollout in gated.group.rollouts} == {1.0}
        assert room.buffer.counts().failed == {reason: 1}

    play(scene, task=Moody(seed=0), answers=[choice(text)], reward_timeout_s=3.0)


def test_a_slow_reward_bounds_what_is_asked(play):
    """Nothing is sampled ahead of the scores: what waits for one holds its slot."""

    async def scene(room):
        await room.until(lambda: len(room.servers[0].requests) == 4)
        await asyncio.sleep(0.3)
        assert len(room.servers[0].requests) == 4, "two groups of two, as concurrency allows"
        assert room.actor.in_flight == 2
        assert room.buffer.counts().in_flight == 2

    play(scene, task=Moody(seed=0), default=lambda: choice("1"), max_lag=9)


def test_a_question_that_fails_is_counted(play):
    class Broken(Addition):
        def item(self, index):
            if index == 0:
                raise KeyError("gone")
            return super().item(index)

    async def scene(room):
        await room.failed("task error: KeyError")
        await room.take(2)

    play(scene, task=Broken(seed=0))


def test_the_actor_ends_when_items_fail_for_long_without_one_success(play):
    async def scene(room):
        with pytest.raises(
            ActorError, match=r"no group was finished within 0\.5 s .*, the last one failed: http 400: g0: .*because"
        ):
            await asyncio.wait_for(room.running, LIMIT_S)
        await room.until(lambda: room.buffer.counts().in_flight == 0)
        room.buffer.counts().check()

    play(scene, default=lambda: 400, give_up_after_s=0.5)


def test_failures_with_a_success_between_them_do_not_end_the_actor(play):
    class EveryOther(Addition):
        def item(self, index):
            if index % 2:
                raise KeyError(index)
            return super().item(index)

    async def scene(room):
        for _ in range(3):
            await room.take(2)
        assert room.buffer.counts().failed["task error: KeyError"] >= 5
        assert await room.finish() == "enough"

    play(scene, concurrency=1, task=EveryOther(seed=0), give_up_after_s=0.001)


@pytest.mark.parametrize("concurrency", [19, 64])
def test_one_outage_ends_no_actor_however_many_groups_are_in_flight(play, concurrency):
    """All of them fail at once, more than once, and are retried until a generator is back."""

    async def scene(room):
        room.urls["g0"] = None
        room.pool.mark_down(room.pool.generators["g0"])
        room.servers[0].default = choice
        await room.until(lambda: room.buffer.counts().failed.get("no generator", 0) >= 6 * concurrency)
        room.urls["g0"] = room.servers[0].url
        trained = {gated.group.group_id for gated in await room.take(concurrency)}
        assert trained == {f"q{index}" for index in range(concurrency)}
        late = {"generator silent"}  # an outage as well, where a slow machine takes longer than token_timeout_s
        assert set(room.buffer.counts().failed) - late == {"no generator"}

    play(
        scene,
        default=lambda: asyncio.sleep(0.05, 503),
        concurrency=concurrency,
        step=concurrency,
        max_lag=0,
        token_timeout_s=0.2,
        give_up_after_s=0.1,
    )


def test_stopping_settles_everything_that_was_granted(play):
    async def scene(room):
        await room.until(lambda: room.servers[0].active == 4)
        room.actor.stop()
        assert await asyncio.wait_for(room.running, LIMIT_S) == "actor stopped"
        await room.failed("actor stopped")
        counts = room.buffer.counts()
        assert counts.failed == {"actor stopped": 2}
        assert counts.in_flight == 0, "a leaving actor is granted no more"

    play(scene, default=lambda: asyncio.sleep(30, choice()))


def test_the_actor_ends_when_the_buffer_is_gone(play):
    async def scene(room):
        await room.take(2)
        room.buffer.close()
        room.listener.close()
        with pytest.raises(ActorError, match="the buffer is gone"):
            await asyncio.wait_for(room.running, LIMIT_S)

    play(scene, dead_after_s=2.0)


class Script:
    """A link without a bus: messages to the actor are put in, those from it are kept, in order."""

    def __init__(self):
        self.sent = []
        self.incoming = []

    def send(self, message):
        self.sent.append(message)

    def receive(self, timeout_s):
        if self.incoming:
            message = self.incoming.pop(0)
            if isinstance(message, BaseException):
                raise message
            return message
        time.sleep(0.005)
        return None


@pytest.fixture
def scripted(tmp_path):
    def run(scene, **kwargs):
        async def main():
            async with Server() as server:
                link = Script()
                async with Room(tmp_path, [server], **kwargs).open(link) as room:
                    await scene(room, link)

        asyncio.run(main())

    return run


def test_nothing_starts_before_a_grant_and_a_repeated_grant_starts_nothing_twice(scripted):
    async def scene(room, link):
        await room.until(lambda: link.sent)
        await asyncio.sleep(0.1)
        assert [type(message) for message in link.sent] == [ActorHello]
        link.incoming += [Grant(questions=[0, 1]), Grant(questions=[1, 0]), Grant(questions=[1])]
        await room.until(lambda: room.actor.done == 2)
        await asyncio.sleep(0.1)
        assert room.actor.started == 2
        assert [type(message) for message in link.sent] == [ActorHello, GroupDone, GroupDone]

    scripted(scene)


def test_a_delivery_is_repeated_until_it_is_acknowledged(scripted, monkeypatch):
    monkeypatch.setattr(actor_module, "REPEAT_AFTER_S", 0.0)

    async def scene(room, link):
        link.incoming.append(Grant(questions=[5]))

        def deliveries():
            return [message for message in link.sent if not isinstance(message, ActorHello)]

        await room.until(lambda: len(deliveries()) >= 3)
        first, *again = deliveries()
        assert isinstance(first, GroupDone)
        assert all(message == first for message in again)
        link.incoming.append(GroupAck(group_id=first.group.group_id))
        await room.until(lambda: not room.actor._deliveries)
        count = len(deliveries())
        await asyncio.sleep(0.2)
        assert len(deliveries()) == count

    scripted(scene)


def test_finish_gives_up_what_is_under_way_and_waits_for_acknowledgements(scripted):
    async def scene(room, link):
        room.servers[0].answers = [choice(), choice()]
        room.servers[0].default = lambda: asyncio.sleep(30, choice())
        link.incoming.append(Grant(questions=[0]))
        await room.until(lambda: room.actor.done == 1)
        link.incoming.append(Grant(questions=[1, 2, 3]))
        await room.until(lambda: room.actor.in_flight == 2)
        link.incoming.append(Finish(reason="enough"))
        await asyncio.sleep(0.2)
        assert not room.running.done(), "it waits for the acknowledgement"
        assert not any(isinstance(message, ActorBye) for message in link.sent)
        link.incoming.append(GroupAck(group_id="q0"))
        assert await asyncio.wait_for(room.running, LIMIT_S) == "enough"
        assert link.sent[-1] == ActorBye(reason="run finished")

    scripted(scene)


def test_an_idle_actor_says_that_it_leaves(scripted):
    async def scene(room, link):
        await room.until(lambda: link.sent)
        room.actor.stop()
        assert await asyncio.wait_for(room.running, LIMIT_S) == "actor stopped"
        assert link.sent[1:] == [ActorBye(reason="actor stopped")]

    scripted(scene)


def test_it_says_again_that_it_is_there(scripted, monkeypatch):
    monkeypatch.setattr(actor_module, "REPEAT_AFTER_S", 0.0)

    async def scene(room, link):
        await room.until(lambda: len(link.sent) >= 3)
        assert len(set(link.sent)) == 1
        assert isinstance(link.sent[0], ActorHello)

    scripted(scene)


def test_a_group_too_large_for_a_message_is_counted(play, monkeypatch):
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 700)

    async def scene(room):
        await room.failed("too large for a message")
        await room.take(2)

    play(scene, answers=[choice("0" * 50)] * 2)


def test_reasons_without_end_are_logged_up_to_a_bound(scripted, caplog):
    """As of a reward that makes a class of exceptions anew for each failure."""

    async def scene(room, link):
        for number in range(100):
            room.actor._lost(f"q{number}", GroupLost(f"reward error: Odd{number}", "oh"))
        room.actor._lost("q0.1", GroupLost("reward error: Odd0", "oh"))
        assert room.actor.failed == 101
        assert len([message for message in link.sent if isinstance(message, GroupFailed)]) == 101

    scripted(scene)
    lines = [record.getMessage() for record in caplog.records if "group q" in record.getMessage()]
    assert len(lines) == 64
    assert lines[0] == "group q0 failed: reward error: Odd0: oh (logged once per reason)"
    assert lines[-1].endswith("Odd63: oh (logged once per reason; no further reason is logged)")


def test_details_of_the_first_failures_are_reported_up_to_a_bound(scripted):
    async def scene(room, link):
        for number in (0, 0, *range(1, 20)):
            room.actor._lost(
                f"q{number}", GroupLost(f"reward error: Odd{number}", f"{room.actor.failed}\n" + "x" * 500)
            )
        told = {name: text for name, text in room.actor.status().items() if name.startswith(FIRST_FAILED)}
        assert list(told) == [f"{FIRST_FAILED}reward error: Odd{number}" for number in range(8)]
        assert [text[:3] for text in told.values()] == ["0 x", *(f"{number} x" for number in range(2, 9))]
        assert {len(text) for text in told.values()} == {200}

    scripted(scene)


@pytest.mark.parametrize(
    ("event", "says"), [(Refused(reason="no"), "refused.*no"), (PeerLost("silence"), "the buffer is gone: silence")]
)
def test_bad_news_from_the_bus_ends_the_actor(scripted, event, says):
    async def scene(room, link):
        link.incoming.append(event)
        with pytest.raises(ActorError, match=says):
            await asyncio.wait_for(room.running, LIMIT_S)

    scripted(scene)


def test_the_pool_names_missing_generators_and_picks_the_least_loaded(tmp_path):
    async def main():
        async with Server() as server, aiohttp.ClientSession() as session:
            urls = {"g0": server.url, "g1": server.url}

            def url_of(name):
                if name not in urls:
                    raise FileNotFoundError(name)
                return urls[name]

            async with Pool(session, ["g8", "g9"], url_of) as pool:
                with pytest.raises(NoGenerator, match=r"no generator was ready within 0 s: g8, g9$"):
                    await pool.wait_any(0.3)
            async with Pool(session, ["g0", "g1", "g2"], url_of) as pool:
                await pool.wait_any(LIMIT_S)
                await until(lambda: pool.generators["g1"].up)
                async with pool.lease((), 1) as first, pool.lease((), 1) as second:
                    assert {first.name, second.name} == {"g0", "g1"}
                    async with pool.lease([second.name], 1) as third:
                        assert third is first
                assert first.load == second.load == 0
                server.health = 500
                pool.mark_down(first)
                pool.mark_down(second)
                with pytest.raises(NoGenerator, match="g0, g1, g2"):
                    async with pool.lease((), 0.05):
                        pass

    asyncio.run(main())


def test_a_generator_whose_route_is_withdrawn_gets_no_new_requests_until_it_is_back(monkeypatch):
    monkeypatch.setattr("inflight.actor.pool.PROBE_EVERY_S", 0.02)

    async def main():
        async with Server() as server, Server() as moved, aiohttp.ClientSession() as session:
            urls = {"g0": server.url, "g1": server.url}

            def url_of(name):
                if name not in urls:
                    raise FileNotFoundError(name)
                return urls[name]

            async with Pool(session, ["g0", "g1"], url_of) as pool:
                await until(lambda: all(generator.up for generator in pool.generators.values()))
                del urls["g1"]
                await until(lambda: not pool.generators["g1"].up)
                async with pool.lease((), 1), pool.lease((), 1) as second:
                    assert second.name == "g0"
                urls["g1"] = moved.url
                await until(lambda: pool.generators["g1"].up)
                assert pool.generators["g1"].url == moved.url

    asyncio.run(main())


def test_a_generator_that_does_not_answer_a_probe_keeps_no_other_waiting(monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.02)

    async def healthy(session, url, timeout_s):
        if url == "silent":
            await asyncio.sleep(3600)
        return True

    monkeypatch.setattr(pool_module, "healthy", healthy)

    async def main():
        urls = {"g0": "silent", "g1": "there"}
        async with Pool(None, ["g0", "g1"], lambda name: urls[name]) as pool:
            await until(lambda: pool.generators["g1"].up)
            urls["g1"] = "elsewhere"
            await until(lambda: pool.generators["g1"].url == "elsewhere")

    asyncio.run(main())


def test_a_request_that_is_cancelled_while_its_wait_ends_leaves_the_pool_as_it_was(monkeypatch):
    """In an outage many waits end at once, and what else a group has asked is cancelled with the first."""
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.02)

    async def healthy(*_):
        return True

    monkeypatch.setattr(pool_module, "healthy", healthy)

    async def main():
        urls = {}

        def url_of(name):
            if name not in urls:
                raise FileNotFoundError(name)
            return urls[name]

        async with Pool(None, ["g0"], url_of) as pool:

            async def ask():
                async with pool.lease((), LIMIT_S) as generator:
                    return generator.name

            waiting = asyncio.create_task(ask())
            await until(lambda: pool._came_up._waiters)
            async with pool._came_up:  # as another request whose wait ends has it
                for _ in range(2):
                    waiting.cancel()
                    for _ in range(5):
                        await asyncio.sleep(0)
                assert not waiting.done(), "it would have given back a lock that is not its own"
            await asyncio.wait([waiting], timeout=LIMIT_S)
            assert waiting.cancelled()
            urls["g0"] = "there"
            assert await asyncio.wait_for(ask(), LIMIT_S) == "g0"

    asyncio.run(main())


def test_an_error_that_ends_the_probing_reaches_waiting_requests(monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.02)

    async def main():
        broken = asyncio.Event()

        def url_of(name):
            if broken.is_set():
                raise KeyError("a mistake")
            raise FileNotFoundError(name)

        async with Pool(None, ["g0", "g1"], url_of) as pool:
            waiting = asyncio.create_task(pool.wait_any(LIMIT_S))
            await asyncio.sleep(0.1)
            broken.set()
            with pytest.raises(ExceptionGroup) as caught:
                await waiting
            assert caught.group_contains(KeyError, match="a mistake")
            with pytest.raises(ExceptionGroup):
                async with pool.lease((), LIMIT_S):
                    pass

    asyncio.run(main())


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.01)


class Listed:
    """What the publisher tells."""

    def __init__(self):
        self.routes = Routes(version=0, generators={})

    def add(self, url):
        self.routes = Routes(version=0, generators={"g0": Route(url=url, version=0, incarnation="")})

    def __call__(self):
        return self.routes


# --- the process ---


@pytest.fixture
def without_children(monkeypatch):
    """Foreign code runs in this process: loading the model's tokenizer in another one takes seconds."""

    @contextlib.asynccontextmanager
    async def foreign(config):
        yield in_process(Addition(seed=config.seed), Tokens(), config.rollout.reward_timeout_s)

    monkeypatch.setattr(entry, "foreign", foreign)


def write_run(tmp_path, **kwargs):
    config = replace(make_config(tmp_path, **kwargs), task=TaskConfig(name="addition"))
    configuration.save(config)
    (tmp_path / "bus").mkdir()
    return config


@pytest.mark.parametrize("name", ["g0", "a01x", "a", "a12345"])
def test_a_wrong_name_is_one_line(tmp_path, capsys, name):
    write_run(tmp_path)
    assert entry.main(["--run-dir", str(tmp_path), "--name", name]) == 2
    assert f"--name {name} is not allowed" in capsys.readouterr().err


def test_no_run_folder_is_one_line(tmp_path, capsys):
    assert entry.main(["--run-dir", str(tmp_path), "--name", "a0"]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_the_process_reports_works_and_ends(tmp_path, monkeypatch, without_children):
    monkeypatch.setattr(entry, "STATUS_EVERY_S", 0.05)
    config, listed = write_run(tmp_path), Listed()

    async def main():
        async with Server() as server:
            with (
                Listener(config.endpoint("status"), config.bus) as status,
                Listener(config.endpoint("rollouts"), config.bus) as listener,
                Buffer(listener, config, routes=listed) as buffer,
            ):
                working = asyncio.create_task(entry.work(config, "a0"))
                seen = [await asyncio.to_thread(status.receive, LIMIT_S)]
                listed.add(server.url)
                await asyncio.to_thread(buffer.take, 2, 0, LIMIT_S)
                assert await asyncio.to_thread(buffer.finish, "enough", LIMIT_S)
                await asyncio.wait_for(working, LIMIT_S)
                seen += iter(lambda: status.receive(0.2), None)
                buffer.counts().check()
                return [event.message for event in seen if hasattr(event, "message")]

    reports = asyncio.run(main())
    assert all(isinstance(report, Status) and report.source == "a0" for report in reports)
    assert reports[0].values["phase"] == "waiting for generators"
    assert {"started", "done", "failed", "aborted", "in_flight", "tokens_per_s", "reward", "version.g0"} <= set(
        reports[0].values
    )


@pytest.mark.parametrize("phase", ["waiting for generators", "sampling"])
def test_sigterm_ends_the_process_clean(tmp_path, monkeypatch, without_children, phase):
    monkeypatch.setattr(entry, "STATUS_EVERY_S", 0.05)
    config, listed = write_run(tmp_path), Listed()
    counts = []

    async def serve():
        async with Server(default=lambda: asyncio.sleep(60, choice())) as server:
            if phase == "sampling":
                listed.add(server.url)
            await asyncio.to_thread(watch)

    def watch():
        with (
            Listener(config.endpoint("status"), config.bus) as status,
            Listener(config.endpoint("rollouts"), config.bus) as listener,
            Buffer(listener, config, routes=listed) as buffer,
        ):
            for _ in range(300):
                values = getattr(getattr(status.receive(0.1), "message", None), "values", {})
                if values.get("phase") == phase and values["in_flight"] == (2 if phase == "sampling" else 0):
                    break
            os.kill(os.getpid(), signal.SIGTERM)
            process_ended.wait(LIMIT_S)
            eventually(lambda: buffer.counts().in_flight == 0, "what it says of its groups")
            counts.append(buffer.counts())

    process_ended = threading.Event()
    around = threading.Thread(target=asyncio.run, args=(serve(),))
    around.start()
    assert entry.main(["--run-dir", str(tmp_path), "--name", "a0"]) == entry.STOPPED
    process_ended.set()
    around.join(LIMIT_S)
    assert counts[0].failed == ({"actor stopped": 2} if phase == "sampling" else {})
    counts[0].check()


def test_the_launcher_hears_at_once_that_the_process_works():
    """What dies within its first second is started again, too."""
    sent = []

    async def begin():
        reporting = asyncio.create_task(entry.report(SimpleNamespace(send=sent.append), "a0", lambda: {"tokens": 0}))
        await asyncio.sleep(0)
        reporting.cancel()

    asyncio.run(begin())
    assert [message.values for message in sent] == [{"tokens": 0, "tokens_per_s": 0.0}]
