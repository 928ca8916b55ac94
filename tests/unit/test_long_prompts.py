"""Prompts around the context's length: too long ones are given up by name, before anything is sent."""

from __future__ import annotations

from dataclasses import replace

from test_actor import play, quick  # noqa: F401 - fixtures

from inflight.tasks.addition import Addition

CONTEXT = 256
"""`generator.max_model_len` as it is by default."""
TOO_LONG = 15


class Long(Addition):
    """The first questions leave no room for a token, the next one leaves room for one."""

    def item(self, index):
        item = super().item(index)
        if index < TOO_LONG:
            return replace(item, prompt="1" * (CONTEXT + index))
        return replace(item, prompt="1" * (CONTEXT - 1)) if index == TOO_LONG else item


def test_prompts_that_are_too_long_have_their_own_reason_and_the_run_continues(play):  # noqa: F811
    async def scene(room):
        batch = await room.take(2)
        assert len(batch[0].group.rollouts[0].prompt_ids) == CONTEXT - 1
        counts = room.buffer.counts()
        counts.check()
        assert counts.failed == {"prompt too long": TOO_LONG}
        assert max(len(request["prompt"]) for request in room.servers[0].requests) == CONTEXT - 1
        assert await room.finish() == "enough", "the actor lives"

    play(scene, task=Long(seed=0), concurrency=1)


def test_a_run_may_ask_for_less(play):  # noqa: F811
    """Questions of 4 tokens and of more: the limit leaves one of the two kinds out."""

    class Two(Addition):
        def item(self, index):
            return replace(super().item(index), prompt="1" * (4 if index % 2 else 5))

    async def scene(room):
        batch = await room.take(2)
        assert [len(gated.group.rollouts[0].prompt_ids) for gated in batch] == [4, 4]
        assert room.buffer.counts().failed["prompt too long"] >= 1
        assert await room.finish() == "enough"

    play(scene, task=Two(seed=0), concurrency=1, max_prompt_tokens=4)
