"""Foreign code in real child processes: whatever it does costs the call, with its reason, and nothing else."""

import asyncio
import contextlib
import errno
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_generator import eventually
from rollout_samples import make_config

from inflight.actor import calls
from inflight.actor.called import GroupLost
from inflight.actor.calls import MakeTask, Question
from inflight.actor.crew import Crew
from inflight.actor.foreign import Foreign, foreign
from inflight.actor.output import Allowance, ChildOutput
from inflight.actor.worker_process import Bounds
from inflight.config import ConfigError, RewardConfig, TaskConfig
from inflight.processes import living_of
from inflight.types import PrefillSpan, Turn, VersionSpan

LIMIT_S = 90.0
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Children find this folder's modules, and the tree under test."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")


class Echo:
    """In place of a tokenizer: a completion's text is looked up by its first token."""

    ready = calls.Constructed(size=10)

    def __init__(self, texts):
        self.texts = texts

    async def call(self, ask):
        asked = ask(0)
        if isinstance(asked, calls.AskEncode):
            return calls.TokensAre(0, [1, 2])
        return calls.TextIs(0, self.texts[asked.token_ids[0]])


QUESTION = Question("odd:1", "1+1=", "")


def turn(*token_ids):
    return Turn(
        token_ids=list(token_ids),
        logprobs=[-1.0] * len(token_ids),
        token_versions=[VersionSpan(0, 0)],
        prefill_versions=[PrefillSpan(0, 0, 0)],
        finish_reason="stop",
    )


@contextlib.asynccontextmanager
async def open_task(kind="Odd", *, limit_s=1.0, concurrency=1, size=1, memory_mib=1024, texts=(), **options):
    """A Foreign with children for a task of odd_task.py."""
    make = MakeTask(name=f"odd_task:{kind}", options=options, seed=0, limit_s=limit_s)
    bounds = Bounds(limit_s=limit_s, start_s=LIMIT_S, memory_mib=memory_mib, concurrency=1)
    items, scores = Crew(make, bounds, 1), Crew(make, replace(bounds, concurrency=concurrency), size)
    try:
        for crew in (items, scores):
            crew.start()
        for crew in (items, scores):
            await crew.made()
        yield Foreign(items, scores, Echo(texts), limit_s)
    finally:
        await items.close()
        await scores.close()


async def reason_of(coroutine):
    """What the group is counted by, or the result."""
    try:
        return await coroutine
    except GroupLost as lost:
        return lost.reason


async def total(code, turn):
    alone = await code.score(QUESTION, [1], await code.completion(QUESTION, turn))
    return code.total(QUESTION, alone, {})


async def score(code, completion, *more):
    """The score of a completion that is one of the texts; several at once give a list."""
    texts = code._text.texts
    all_of_them = await asyncio.gather(
        *(reason_of(total(code, turn(texts.index(each)))) for each in (completion, *more))
    )
    scores = [each if isinstance(each, str) else each.reward for each in all_of_them]
    return scores if more else scores[0]


def test_whatever_a_question_is_costs_it_alone():
    wanted = {
        "raise": "task error: KeyError",
        "raise unspeakable": "task error: _Unspeakable",
        "exit": "task error: SystemExit",
        "end": "task error: StopIteration",
        "no item": "task error: item",
        "no prompt": "task error: prompt",
        "surrogate prompt": "task error: UnicodeEncodeError",
        "surrogate key": "task error: UnicodeEncodeError",
        "long key": "task error: key",
        "number key": "task error: key",
        "object": "task error: NotCarried",
        "die": "task crash: code 139",
        "sleep": "task timeout",
    }

    async def main():
        async with open_task(items=list(wanted)) as code:
            found = {how: await reason_of(code.question(index)) for index, how in enumerate(wanted)}
            fine = await code.question(len(wanted))
        assert found == wanted
        assert fine == Question(f"odd:{len(wanted)}", "1+1=", {"sum": [2, None]})

    asyncio.run(main())


def test_whatever_a_plain_score_does_costs_it_alone():
    wanted = {
        "fine": 1.0,
        "raise": "reward error: KeyError",
        "exit": "reward error: SystemExit",
        "text": "reward error: no number",
        "none": "reward error: no number",
        "nan": "reward error: not finite",
        "memory": "reward error: MemoryError",
        "regex": "reward timeout",
        "segfault": "reward crash: SIGSEGV",
        "die": "reward crash: code 139",
    }

    async def main():
        async with open_task(texts=list(wanted)) as code:
            assert {how: await score(code, how) for how in wanted} == wanted
            assert await score(code, "fine") == 1.0

    asyncio.run(main())


def test_a_score_of_a_turn_is_checked():
    wanted = {
        "fine": 0.5,
        "float": "reward error: score",
        "steps": "reward error: step_rewards",
        "teacher": "reward error: teacher_logprobs",
    }

    async def main():
        async with open_task("Turned", texts=list(wanted)) as code:
            found = {}
            for number, how in enumerate(wanted):
                given = await reason_of(total(code, turn(number, 3)))
                found[how] = given if isinstance(given, str) else given.reward
            assert found == wanted

    asyncio.run(main())


def test_a_child_is_killed_with_all_that_it_has_started(tmp_path):
    async def main():
        async with open_task(texts=["family", "fine"], folder=str(tmp_path)) as code:
            scoring = asyncio.create_task(score(code, "family"))
            family = []
            while len(family) < 2 and not scoring.done():
                await asyncio.sleep(0.02)
                with contextlib.suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
                    child = psutil.Process(int((tmp_path / "child").read_text()))
                    family = [child, *child.children()]
            assert await scoring == "reward timeout"
            assert len(family) == 2
            await asyncio.to_thread(eventually, lambda: not living_of(family), "their end")
            assert await score(code, "fine") == 1.0

    asyncio.run(main())


def test_what_a_child_leaves_that_ends_by_itself_is_killed(tmp_path):
    """In a process of its own, which adopts orphans as an actor does."""
    code = f"""
import asyncio
from inflight.descendants import adopt
from test_foreign_code import open_task, score
async def main():
    async with open_task(texts=["orphan", "fine"], folder={str(tmp_path)!r}) as code:
        print(await score(code, "orphan"), await score(code, "fine"))
adopt()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "reward crash: code 139 1.0\n", done.stderr
    orphan = int((tmp_path / "orphan").read_text())
    eventually(lambda: not living_of(each for each in psutil.process_iter() if each.pid == orphan), "its end")


def test_asynchronous_scores_wait_together_and_are_late_alone():
    async def main():
        async with open_task("Waiting", texts=["fine", "soon", "wait"], concurrency=16) as code:
            assert await score(code, *["soon"] * 16, "wait", "fine") == [1.0] * 16 + ["reward timeout", 1.0]

    asyncio.run(main())


@pytest.mark.parametrize(
    "how, reason", [("sleep", "reward timeout"), ("die", "reward crash: code 139"), ("regex", "reward timeout")]
)
def test_who_blocks_a_child_that_others_share_is_found_and_the_others_score(how, reason):
    async def main():
        texts = ["fine", "soon", how]
        async with open_task("Waiting", texts=texts, concurrency=16) as code:
            assert await score(code, "soon", "soon", how, "fine") == [1.0, 1.0, reason, 1.0]

    asyncio.run(main())


def test_hanging_threads_delay_no_other_call():
    """Each orphans a thread; more of them than asyncio's pool has threads."""

    async def main():
        async with open_task("Waiting", texts=["short thread", "thread"], concurrency=16, limit_s=0.5) as code:
            assert await score(code, *["thread"] * 12) == ["reward timeout"] * 12
            assert await score(code, *["short thread"] * 12) == [1.0] * 12

    asyncio.run(main())


def test_a_task_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("raise RuntimeError('no data:\\n/data/questions.jsonl')\n")
    (tmp_path / "dying_task.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HERE.parents[1]}")

    async def main(name):
        config = replace(make_config(tmp_path), task=TaskConfig(name=name))
        with pytest.raises(ConfigError) as caught:
            async with foreign(config):
                pass
        return str(caught.value)

    broken = asyncio.run(main("broken_task:T"))
    assert broken == (
        "task.name='broken_task:T' can't be imported: RuntimeError: no data: /data/questions.jsonl "
        f"({tmp_path}/broken_task.py, line 1)"
    )
    dying = asyncio.run(main("dying_task:T"))
    assert dying == "task.name='dying_task:T' can't be used: its process ended: code 7"


def test_the_models_own_tokenizer_is_used(tmp_path):
    async def main():
        config = replace(make_config(tmp_path), task=TaskConfig(name="addition"))
        async with foreign(config) as code:
            question = await code.question(0)
            ids = await code.encode(question)
            assert len(ids) == len(question.prompt)
            assert code.vocabulary > max(ids)
            answer = await code._text.call(lambda call: calls.AskDecode(call, [*ids, 1]))
            assert answer.text == question.prompt, "special tokens are no text"
            assert await reason_of(code.encode(Question("k", "\ud835", ""))) == "tokenizer error: UnicodeEncodeError"

    asyncio.run(main())


def test_processes_that_a_score_forks_answer_no_calls():
    """Each would send a second answer, and then read the calls that are not its own."""

    async def main():
        async with open_task(texts=["fork", "fork and return", "fine"]) as code:
            for _ in range(3):
                assert await score(code, "fork") == 1.0
                assert await score(code, "fork and return") == 1.0
            assert [await score(code, "fine") for _ in range(4)] == [1.0] * 4

    asyncio.run(main())


@pytest.mark.parametrize("how", ["exit later", "close output", "signals"])
def test_what_a_score_leaves_behind_costs_no_later_call(how):
    async def main():
        async with open_task(texts=[how, "fine", "sleep"], limit_s=3.0) as code:
            assert await score(code, how) == 1.0
            assert [await score(code, "fine") for _ in range(3)] == [1.0] * 3
            assert await score(code, "sleep") == "reward timeout"
            assert await score(code, "fine") == 1.0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close all", "patch"])
def test_who_breaks_its_own_process_is_found(how):
    async def main():
        async with open_task(texts=[how, "fine"]) as code:
            assert isinstance(await score(code, how), str)
            assert await score(code, "fine") == 1.0

    asyncio.run(main())


@pytest.mark.parametrize("before, victim", [("die later", "slow"), ("leak", "need")])
def test_an_earlier_call_of_the_child_costs_no_later_one(before, victim):
    async def main():
        async with open_task(texts=[before, victim], limit_s=10.0, concurrency=2) as code:
            assert await score(code, before) == 1.0
            assert await score(code, victim) == 1.0

    asyncio.run(main())


def test_a_moment_without_room_for_a_process_costs_no_call(monkeypatch):
    start, refused = subprocess.Popen, iter([True, True])

    def popen(*args, **kwargs):
        if next(refused, False):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*args, **kwargs)

    async def main():
        async with open_task(texts=["die", "fine"]) as code:
            monkeypatch.setattr(subprocess, "Popen", popen)
            assert await score(code, "die") == "reward crash: code 139"
            assert await score(code, "fine") == 1.0
        assert not any(refused), "both were tried"

    asyncio.run(main())


def test_a_child_that_is_being_made_at_the_end_is_no_failure(caplog):
    async def ended():
        make = MakeTask(name="addition", options={"digits": 1, "held_out": 20}, seed=0, limit_s=1.0)
        crew = Crew(make, Bounds(limit_s=1.0, start_s=LIMIT_S, memory_mib=1024, concurrency=1), 2)
        crew.start()
        await crew.made()
        assert crew.ready != calls.Constructed()
        crew.start()
        await crew.close()

    asyncio.run(ended())
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


def test_output_is_copied_up_to_a_bound(capfd):
    """64 MiB in one call: nearly all is left out, and what comes later is there."""

    async def main():
        async with open_task(texts=["write", "print"], limit_s=20.0) as code:
            assert await score(code, "write") == 1.0
            assert await score(code, "print") == 1.0

    asyncio.run(main())
    text = capfd.readouterr().err
    assert len(text) < 2 << 20
    assert re.search(r"^\[task\] \d{7,8} bytes of a child's output were left out$", text, re.MULTILINE)
    assert text.count("x") >= 1 << 16


def test_children_that_replace_each_other_share_what_they_may_print(capfd):
    """Each of three children prints 1.5 MiB and ends its process: together no more is copied than of one."""
    began = time.monotonic()

    async def main():
        async with open_task(texts=["write and die", "print"], limit_s=20.0) as code:
            for _ in range(3):
                assert await score(code, "write and die") == "reward crash: code 139"

    asyncio.run(main())
    text = capfd.readouterr().err
    assert 1 << 19 <= text.count("y") <= (1 << 20) + 4096 * (time.monotonic() - began)


def test_each_line_of_a_child_begins_with_what_it_is_for(tmp_path):
    """In pieces that end anywhere; what is put before them counts as output, and no line follows another's end."""

    async def main(log):
        output = ChildOutput(Allowance(), "reward x", log.fileno())
        for piece in (b"one", b" line\n", b"two\n\nfour\n", b"fi", b"ve"):
            os.write(output.write_end, piece)
            assert output._copy()
        output.started()
        output.close()
        spent = Allowance()
        assert spent.take((1 << 20) - 12000, time.monotonic())
        output = ChildOutput(spent, "reward y", log.fileno())
        os.write(output.write_end, b"\n" * 1000)
        assert output._copy()
        os.write(output.write_end, b"\n" * 1000)
        output.started()
        output.close()

    with (tmp_path / "log").open("wb") as log:
        asyncio.run(main(log))
    text = (tmp_path / "log").read_text()
    five = ["one line", "two", "", "four", "five"]
    assert text.splitlines()[:5] == [f"[reward x] {line}" for line in five]
    assert text.splitlines()[5:] == ["[reward y] "] * 1000 + ["[reward y] 1000 bytes of a child's output were left out"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (calls.MakeTokenizer(model="m"), "tokenizer"),
        (MakeTask(name="addition", options={}, seed=0, limit_s=1.0), "task"),
        (MakeTask(name="addition", options={}, seed=0, limit_s=1.0, scores_only=True), "score of the task"),
        ((("math", ""), ("a.py:short", "brief"), ("format", "")), "reward brief"),
        ((("math", ""), ("format", "")), "rewards math, format"),
        (tuple((f"a:f{number}", "") for number in range(5)), "rewards f0, f1, f2 and 2 more"),
    ],
)
def test_what_a_child_is_for_is_told_in_a_few_words(make, says):
    if isinstance(make, tuple):
        make = calls.MakeRewards(rewards=[RewardConfig(name, label=label) for name, label in make], limit_s=1.0)
    assert calls.what_for(make) == says


def test_an_allowance_grows_with_time_up_to_its_first_size():
    allowance = Allowance()
    assert allowance.take(1 << 20, 100.0)
    assert not allowance.take(1, 100.0)
    assert not allowance.take(4097, 101.0)
    assert allowance.take(4096, 101.0)
    assert not allowance.take((1 << 20) + 1, 1e9)
    assert allowance.take(1 << 20, 1e9)
