"""A group whose prompt is long has one generator, which computes the prompt once; others are spread."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from openai_server import choice
from test_actor import LIMIT_S, play, quick  # noqa: F401 - fixtures

from inflight.actor import pool as pool_module
from inflight.actor.pool import Pool, Together
from inflight.config import ConfigError
from inflight.config.effect import require_effect
from inflight.launcher.compose import compose

SIZE = 4


def generators_of(groups):
    return [{rollout.generator for rollout in gated.group.rollouts} for gated in groups]


@pytest.mark.parametrize(("from_tokens", "generators"), [(1, 1), (0, 2), (1000, 2)])
def test_the_samples_of_a_group_go_to_one_generator_where_its_prompt_is_long(play, from_tokens, generators):  # noqa: F811
    """Of two groups that are under way at once, after a step when both generators are up."""
    gate = asyncio.Event()
    gate.set()

    async def held():
        await gate.wait()
        return choice()

    async def scene(room):
        await room.until(lambda: all(generator.up for generator in room.pool.generators.values()))
        await room.until(lambda: room.buffer.counts().buffered == 2)
        gate.clear()
        await room.take(2)
        await room.until(lambda: sum(server.active for server in room.servers) == 2 * SIZE)
        gate.set()
        found = generators_of(await room.take(2))
        assert [len(each) for each in found] == [generators] * 2
        assert set.union(*found) == {"g0", "g1"}, "no generator is idle"
        await room.finish()

    play(scene, servers=2, size=SIZE, concurrency=2, max_lag=0, default=held, routing={"together_from": from_tokens})


def test_a_group_whose_generator_fails_is_answered_by_another(play):  # noqa: F811
    async def scene(room):
        room.servers[0].default = lambda: 503
        room.servers[0].health = 503
        assert generators_of(await room.take(2)) == [{"g1"}] * 2
        await room.finish()

    play(scene, servers=2, size=SIZE, concurrency=2, routing={"together_from": 1})


def test_one_generator_is_not_loaded_for_the_sake_of_a_prompt_beyond_its_worth(monkeypatch):
    async def healthy(*_):
        return True

    monkeypatch.setattr(pool_module, "healthy", healthy)

    async def main():
        async with Pool(None, ["g0", "g1"], lambda name: name) as pool, asyncio.timeout(LIMIT_S):
            while not all(generator.up for generator in pool.generators.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            together = Together(worth=2)
            async with contextlib.AsyncExitStack() as stack:
                names = [(await stack.enter_async_context(pool.lease((), LIMIT_S, together))).name for _ in range(6)]
                assert names == ["g0", "g0", "g0", "g1", "g0", "g1"]
                avoiding = await stack.enter_async_context(pool.lease(["g0"], LIMIT_S, together))
                assert avoiding.name == "g1", "one that has failed the sample is avoided all the same"

    asyncio.run(main())


def test_from_how_many_tokens_on_is_a_matter_of_configuration():
    assert compose("tiny", []).together_from == 512
    assert compose("tiny", ["generator.prefix_caching=false"]).together_from == 0
    with pytest.raises(ConfigError, match=r"rollout\.together_from_tokens=-1 is not allowed"):
        compose("tiny", ["rollout.together_from_tokens=-1"])
    for more in ([], ["generator.count=2", "generator.prefix_caching=false"]):
        with pytest.raises(ConfigError, match=r"rollout\.together_from_tokens is set and has no effect: "):
            require_effect(compose("tiny", ["rollout.together_from_tokens=64", *more]))
