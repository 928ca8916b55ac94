"""A run on 200 chats of one's own over two epochs, killed and resumed: which are asked, in which order, how often.

Data, chat template, tokenizer, actor, sockets, buffer and files are real; tests/slow/test_own_model.py has the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import aiohttp
import datasets
import pytest
from in_process import in_process
from openai_server import Server, choice
from rollout_samples import make_config
from test_actor import LIMIT_S, quick  # noqa: F401 - a fixture
from test_dataset import lines

from inflight.actor.loop import Actor
from inflight.actor.pool import Pool
from inflight.actor.sampler import Sampler
from inflight.bus import Link, Listener
from inflight.groups import index_of
from inflight.models import prepare
from inflight.prompts import ModelTokens
from inflight.rollout.books import NO_BOOKS
from inflight.rollout.buffer import ROLLOUTS_FILE, Buffer, DataEnded
from inflight.rollout.restore import restore
from inflight.rollout.stream import Reader
from inflight.tasks.course import Course
from inflight.tasks.dataset import Dataset

ROWS, EPOCHS, STEP = 200, 2, 19
HELD_OUT = 10
STEPS = (ROWS - HELD_OUT) * EPOCHS // STEP
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
BAD = {"template error: TemplateError": "system", "prompt too long": "user"}
"""Rows that can't be asked: how they are counted, and the role of their message."""
SHORT = {"max_prompt_tokens": 40}
QUESTIONS = (ROWS - HELD_OUT + len(BAD)) * EPOCHS
SAVED, KILLED = 5, 8
"""The steps of the checkpoint, and of the kill."""


class Scored(Dataset):
    """With a score of its own: what rewards do is tested elsewhere."""

    def score(self, item, completion):
        return float(completion == item.answer)


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    sums = [(n % 10, n // 10) for n in range(ROWS)]
    rows = [{"messages": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)} for a, b in sums]
    rows += [{"messages": [{"role": role, "content": "1" * 60}], "answer": "1"} for role in BAD.values()]
    path = str(lines(tmp_path / "problems.jsonl", rows))
    return Scored(0, path, messages="messages", held_out=0.05, chat_template=str(tmp_path / "t.jinja"))


@contextlib.asynccontextmanager
async def start(config, task, tokens, server, books=NO_BOOKS, groups=()):
    """A buffer and an actor, as each start of a run has them; they end as if they were killed."""
    code = in_process(task, tokens, epochs=EPOCHS)
    endpoint = config.endpoint("rollouts")
    with Listener(endpoint, config.bus) as listener, Buffer(listener, config, books, groups) as buffer:
        with Link(endpoint, "a0", config.bus) as link:
            async with aiohttp.ClientSession() as session, Pool(session, ["g0"], lambda name: server.url) as pool:
                room = {"longest_prompt": config.longest_prompt}
                sampler = Sampler(config.rollout, config.request_seed, code, session, pool, **room)
                actor = Actor("a0", link, sampler, concurrency=config.rollout.concurrency, give_up_after_s=LIMIT_S)
                await pool.wait_any(LIMIT_S)
                running = asyncio.create_task(actor.run())
                try:
                    yield buffer
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)


def test_each_chat_is_asked_once_an_epoch_in_the_order_of_the_task_though_the_run_was_killed(tmp_path, task):
    (tmp_path / "bus").mkdir()
    config = make_config(tmp_path, step=STEP, concurrency=8, keep=True, steps=1000, file_mib=0.02, **SHORT)
    tokens, version = ModelTokens(str(prepare("tiny"))), 0

    def answer():
        return choice("07", version)

    async def steps(buffer, first, last):
        nonlocal version
        trained = {}
        for step in range(first, last + 1):
            usable = await asyncio.to_thread(buffer.take, STEP, step - 1, LIMIT_S)
            trained[step] = [index_of(gated.group.group_id) for gated in usable]
            version = step
            if step == SAVED:
                saved.append(buffer.books())
        return trained

    saved: list = []

    async def scene():
        nonlocal version
        async with Server(answer) as server:
            async with start(config, task, tokens, server) as buffer:
                begun = await steps(buffer, 1, KILLED)
            version, resumed = SAVED, replace(config, checkpoint=f"step-{SAVED:06d}")
            waiting = restore(tmp_path / ROLLOUTS_FILE, saved[0], SAVED)
            async with start(resumed, task, tokens, server, saved[0], waiting) as buffer:
                rest = await steps(buffer, SAVED + 1, STEPS)
                ended = f"all {QUESTIONS} questions were asked, .* groups failed .*, and 0 groups are left"
                with pytest.raises(DataEnded, match=ended):
                    await asyncio.to_thread(buffer.take, STEP, STEPS, LIMIT_S)
                counts = buffer.counts()
                counts.check()
                assert (counts.trained, counts.dropped) == (STEPS * STEP, {})
                assert {reason: counts.failed[reason] for reason in BAD} == dict.fromkeys(BAD, EPOCHS)
            return {step: begun[step] for step in range(1, SAVED + 1)} | rest

    trained = asyncio.run(scene())
    course = Course(task, EPOCHS)
    items = {index: course.item(index) for index in range(QUESTIONS)}
    items = {index: item for index, item in items.items() if len(item.prompt.messages[0]["content"]) < 60}
    keys = [item.key for item in items.values()]
    assert sorted(index for step in trained.values() for index in step) == sorted(items)
    assert Counter(keys) == dict.fromkeys(keys, EPOCHS)
    found = {index_of(group.group_id): group for group in Reader(tmp_path / ROLLOUTS_FILE)}
    assert len(list((tmp_path / ROLLOUTS_FILE).parent.iterdir())) > 3, "several files"
    assert sorted(found) == sorted(items)
    for index, item in items.items():
        assert found[index].prompt_key == item.key
        assert found[index].rollouts[0].prompt_ids.tolist() == list(tokens.encode(item.prompt))
    assert keys[: len(keys) // EPOCHS] != keys[len(keys) // EPOCHS :], "another order in the second epoch"
    held_out = {task.held_out_item(index).prompt.messages[0]["content"] for index in range(task.held_out_size())}
    assert len(held_out) == HELD_OUT
    assert not held_out & {item.prompt.messages[0]["content"] for item in items.values()}
