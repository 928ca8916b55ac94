"""A run on a user's own chats: what is asked, what is dropped, its end, and a resume after SIGKILL."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from inflight.config import load
from inflight.exits import BAD_INPUT, DATA_ENDED
from inflight.groups import index_of
from inflight.prompts import ModelTokens
from inflight.rollout.stream import Reader
from inflight.tasks import make
from inflight.tasks.course import Course

pytestmark = pytest.mark.faults

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
REWARD = """
def digits(completions, prompts, answer, **columns):
    return [sum(a == b for a, b in zip(text, right)) / 2 for text, right in zip(completions, answer)]
"""
ROWS = 12
EPOCHS = 2


def chat(text, role="user"):
    return [{"role": role, "content": text}]


def write(folder):
    """Twelve chats, a line that is no JSON, a chat that the template refuses, and one that is too long."""
    rows = [{"messages": chat(f"{n % 10}+{n // 10}"), "answer": f"{n % 10 + n // 10:02}"} for n in range(ROWS)]
    odd = [
        '{"messages": [',
        json.dumps({"messages": chat("1", "system"), "answer": "1"}),
        json.dumps({"messages": chat("1" * 300), "answer": "1"}),
    ]
    lines = [*map(json.dumps, rows[:5]), odd[0], *map(json.dumps, rows[5:9]), *odd[1:], *map(json.dumps, rows[9:])]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "t.jinja").write_text(TEMPLATE)
    (folder / "own_reward.py").write_text(REWARD)


def groups(run):
    """The prompt of each group that arrived, by the index of its question."""
    return {
        index_of(group.group_id): (group.prompt_key, list(map(int, group.rollouts[0].prompt_ids)))
        for group in Reader(run.folder / "rollouts" / "rollouts.msgpack")
    }


def expected(run):
    """What the task and the template make of each index."""
    config = load(run.folder)
    course = Course(make(config.task, config.seed), config.task.epochs)
    tokens = ModelTokens(config.model.name)
    found = {}
    for index in range((ROWS + 3) * EPOCHS):
        try:
            item = course.item(index)
            found[index] = (item.key, list(tokens.encode(item.prompt)))
        except Exception:  # noqa: BLE001 - the three that are none
            continue
    return {index: each for index, each in found.items() if len(each[1]) < 256}


def test_a_run_on_chats_ends_with_its_second_epoch_in_the_order_that_it_began_with(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path)
    run = make_run(
        "task.name=dataset",
        f"task.epochs={EPOCHS}",
        f"+task.options.path={tmp_path}/data.jsonl",
        "+task.options.messages=messages",
        f"+task.options.chat_template={tmp_path}/t.jinja",
        f"rewards=[{{name: '{tmp_path}/own_reward.py:digits'}}]",
        "rollout.max_tokens=4",
        "trainer.steps=50",
        "gate.max_token_lag=1000",
        "rollout.file_mib=0.005",
    )
    run.start()
    run.until(lambda: run.steps() >= 5, alive=True)
    run.kill("launcher")
    assert run.wait() != 0
    assert run.resume().wait() == DATA_ENDED, run.logs()

    assert len(list((run.folder / "rollouts").iterdir())) > 2, "several files"
    wanted = expected(run)
    assert len(wanted) == ROWS * EPOCHS
    assert groups(run) == wanted
    assert run.trained() == sorted(wanted), "each question once an epoch"
    keys = [wanted[index][0] for index in sorted(wanted)]
    assert Counter(keys) == dict.fromkeys(keys, EPOCHS)
    assert keys[:ROWS] != keys[ROWS:], "another order in the second epoch"
    failed = run.saved().books.failed
    assert {reason: count for reason, count in failed.items() if not reason.startswith("actor")} == {
        "task error: NotJson": 2,
        "template error: TemplateError": 2,
        "prompt too long": 2,
    }
    assert "data.jsonl, line 6: it is not JSON" in (run.folder / "logs" / "a0.log").read_text()

    lines = (tmp_path / "data.jsonl").read_text().replace("1+0", "1+1")
    (tmp_path / "data.jsonl").write_text(lines)
    assert run.resume().wait() == BAD_INPUT
    says = "data.jsonl' does not hold what it held: the run in"
    (line,) = [line for line in run.output.splitlines() if says in line]
    assert line.startswith("inflight launch: ")
    assert "Traceback" not in run.output
