"""Rewards in real child processes: added up by weight, each with its own name, time limit and failure."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from in_process import InProcess
from reward_samples import place_of
from rollout_samples import make_config, make_group

from inflight.actor.called import GroupLost, Traces, called
from inflight.actor.calls import AskReward, Constructed, Question, ScoreIs, TextIs
from inflight.actor.foreign import Foreign
from inflight.actor.pending import NotMade
from inflight.actor.scoring import rewards_of
from inflight.actor.services import RewardsService
from inflight.actor.worker_process import Bounds
from inflight.config import AdvantageConfig, ConfigError, RewardConfig, TaskConfig
from inflight.groups import defect
from inflight.launcher import preflight
from inflight.launcher.compose import compose
from inflight.prompts import Chat
from inflight.rewards import make_all
from inflight.rollout.gate import gate_group
from inflight.tasks.check import require_columns, usable_task
from inflight.trainer.lines import rewards_and_lags
from inflight.types import PrefillSpan, Turn, VersionSpan

HERE = Path(__file__).parent
BOUNDS = Bounds(limit_s=2.0, start_s=60.0, memory_mib=1024, concurrency=8)
PLAIN = "fine"
RAISES = 'raise KeyError("gone")'


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Children find this folder's modules, and the tree under test."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")


class Text:
    """In place of a tokenizer: the completion's text is the whole turn's."""

    ready = Constructed(size=10)

    def __init__(self):
        self.text = PLAIN

    async def call(self, ask):
        return TextIs(0, self.text)


class Own:
    """In place of the children that run the task's own score."""

    ready = Constructed()

    async def call(self, ask):
        return ScoreIs(0, 0.25, [(0, 0.5)], None)


TURN = Turn(
    token_ids=[4, 5],
    logprobs=[-1.0] * 2,
    token_versions=[VersionSpan(0, 0)],
    prefill_versions=[PrefillSpan(0, 0, 0)],
    finish_reason="stop",
)
QUESTION = Question("k", "1+1=", "aa", {"x": 7})


@contextlib.asynccontextmanager
async def open_rewards(*configs, bounds=BOUNDS):
    async with contextlib.AsyncExitStack() as stack:
        rewards = await rewards_of(configs, bounds, 1, stack)
        yield Foreign(Text(), Own(), Text(), bounds.limit_s, rewards)


async def scores(code, *texts, question=QUESTION):
    """The scores of a group's completions, or what it is counted by."""
    try:
        completions = []
        for code._text.text in texts:
            completions.append(await code.completion(question, TURN))
        alone = [await code.score(question, [1], each) for each in completions]
        compared = await code.compare(question, completions)
        return [code.total(question, *each) for each in zip(alone, compared, strict=True)]
    except GroupLost as lost:
        return lost.reason


async def score(code, text, question=QUESTION):
    """Of a group of one."""
    found = await scores(code, text, question=question)
    return found if isinstance(found, str) else found[0]


def test_a_sum_by_weight_of_plain_and_asynchronous_rewards_and_the_tasks_own():
    """A question's columns, the ids and a chat's messages reach them; None takes no part."""
    given = (
        RewardConfig("length", weight=2.0, options={"target": 4}),
        RewardConfig("reward_samples:soon", weight=0.5, label="late"),
        RewardConfig("task", weight=4.0),
        RewardConfig("reward_samples:share", options={"letter": "n"}),
        RewardConfig(f"{HERE}/reward_samples.py:columns_seen", weight=0.0),
    )
    wanted = {"length": 0.5, "late": 4.0, "task": 0.25, "share": 0.5, "columns_seen": 1.0}
    chat = msgspec.structs.replace(QUESTION, prompt=Chat([{"role": "user", "content": "?"}]))

    async def main():
        async with open_rewards(*given) as code:
            for question in (QUESTION, chat):
                found = await score(code, "fine", question)
                assert found.parts == wanted
                assert found.reward == 2.0 * 0.5 + 0.5 * 4.0 + 4.0 * 0.25 + 0.5
                assert found.step_rewards == [(0, 0.5)], "of the task's own score"
            found = await score(code, "none")
            assert "late" not in found.parts
            assert found.reward == 2.0 * 0.5 + 4.0 * 0.25 + 1.0

    asyncio.run(main())


def test_whatever_a_reward_does_costs_its_group_under_its_name():
    wanted = {
        "raise": f"reward odd error: KeyError at {place_of(RAISES)}",
        "library": f"reward odd error: JSONDecodeError at {place_of('json.loads(')}",
        "float": "reward odd error: no list",
        "texts": "reward odd error: no number",
        "two": "reward odd error: length",
        "nan": "reward odd error: not finite",
        "lines": f"reward odd error: Torn [2J at {place_of('raise type(')}",
        "sleep": "reward odd timeout",
        "die": "reward odd crash: code 139",
        "none": "reward error: none applies",
    }

    async def main():
        async with open_rewards(RewardConfig("reward_samples:odd")) as code:
            assert {text: await score(code, text) for text in wanted} == wanted
            assert (await score(code, "fine")).reward == 0.5
            column = RewardConfig("exact_match", options={"column": "gone"})
        async with open_rewards(column) as code:
            assert await score(code, "x") == "reward exact_match error: column"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (f"{HERE}/reward_samples.py:odd", {}, f"KeyError at {place_of(RAISES)}"),
        ("reward_samples:Own", {"factor": 2.0}, f"ValueError at {place_of('self.factor *')}"),
        ("reward_samples:odd_elsewhere", {}, f"KeyError at {place_of(RAISES)}"),
        ("regex", {"pattern": "a"}, "TypeError"),
    ],
)
def test_an_error_is_counted_by_its_line_where_the_code_is_the_users_own(name, options, reason):
    crew = InProcess(RewardsService(make_all([RewardConfig(name, options=options)])), 30.0)
    question = Question("k", "1+1=", "x", {})
    texts = ["raise"] if "odd" in name else [None]
    ask = functools.partial(
        AskReward, which=0, question=question, completions=texts, completion_ids=[[4]], finish_reasons=["stop"]
    )
    with pytest.raises(GroupLost) as lost:
        asyncio.run(called(crew, "reward x", "k", ask, 30.0, Traces()))
    assert lost.value.reason == f"reward x error: {reason}"


def test_the_log_has_one_traceback_of_each_rewards_first_error(caplog):
    """Without the frames of inflight, and in printable lines."""
    crew = InProcess(RewardsService(make_all([RewardConfig("reward_samples:odd")])), 30.0)
    question, traces = Question("k", "1+1=", "x", {}), Traces()

    def asked(what, text):
        ask = functools.partial(
            AskReward, which=0, question=question, completions=[text], completion_ids=[[4]], finish_reasons=["stop"]
        )
        with pytest.raises(GroupLost):
            asyncio.run(called(crew, what, "k", ask, 30.0, traces))

    for what, text in (("reward x", "float"), ("reward x", "raise"), ("reward x", "library"), ("reward y", "lines")):
        asked(what, text)
    raised, odd = [each.getMessage().splitlines() for each in caplog.records]
    assert raised[:2] == ["the first error of the reward x, with k:", "Traceback (most recent call last):"]
    assert raised[2].startswith(f'  File "{HERE}/reward_samples.py", line ')
    assert raised[3:] == [f"    {RAISES}", "KeyError: 'gone'"]
    assert odd[0] == "the first error of the reward y, with k:"
    assert all(each.isprintable() for each in odd)
    assert odd[-1] == "b [2J c"


def test_a_function_of_ones_own_sees_all_completions_of_a_question_in_one_call():
    """In a child process: plain and asynchronous ones; None takes no part, and what is built in sees each alone."""
    given = (
        RewardConfig("reward_samples:company"),
        RewardConfig("reward_samples:company", label="alone", per="completion"),
        RewardConfig("reward_samples:rank", weight=10.0),
        RewardConfig("reward_samples:rare", weight=100.0),
        RewardConfig("exact_match", weight=1000.0),
        RewardConfig("task", weight=0.0),
    )

    async def main():
        async with open_rewards(*given) as code:
            found = await scores(code, "aa", "", "a", "aa")
            own = {"company": 4.0, "alone": 1.0, "task": 0.25}
            assert [each.parts for each in found] == [
                {**own, "rank": 0.0, "rare": 2 / 3, "exact_match": 1.0},
                {**own, "rare": 1.0, "exact_match": 0.0},
                {**own, "rank": 2 / 3, "rare": 1.0, "exact_match": 0.0},
                {**own, "rank": 0.0, "rare": 2 / 3, "exact_match": 1.0},
            ]
            assert [each.reward for each in found] == pytest.approx([1071.6666, 105.0, 111.6666, 1071.6666], abs=1e-3)

    asyncio.run(main())


def test_a_call_for_a_whole_group_that_fails_costs_it():
    wanted = {
        ("ra", "ise"): f"reward odd error: KeyError at {place_of(RAISES)}",
        ("di", "e"): "reward odd crash: code 139",
        ("tw", "o"): [1.0, 2.0],
        ("no", "ne"): "reward odd error: length",
    }

    async def main():
        async with open_rewards(RewardConfig("reward_samples:odd")) as code:
            for texts, what in wanted.items():
                found = await scores(code, *texts)
                assert (found if isinstance(found, str) else [each.reward for each in found]) == what
        async with open_rewards(RewardConfig("reward_samples:rank")) as code:
            assert await scores(code, "a", "") == "reward error: none applies", "one of the two has no reward at all"

    asyncio.run(main())


def test_one_that_cannot_be_made_is_named():
    async def main():
        with pytest.raises(NotMade, match=r"rewards\[0\]\.options\.target is missing") as raised:
            async with open_rewards(RewardConfig("length")):
                pass
        assert raised.value.bad_input

    asyncio.run(main())


# --- before the start ------------------------------------------------------------------------------------------------


def test_a_task_without_a_score_and_a_column_that_is_not_there_are_refused(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join(json.dumps({"q": f"{n}+1=", "gold": n + 1}) for n in range(4)))
    task = TaskConfig("dataset", {"path": str(data), "prompt": "q"})
    config = replace(make_config(tmp_path), task=task)
    with pytest.raises(ConfigError, match=r"task\.name='dataset' has no score of its own: rewards must say"):
        usable_task(config)
    with pytest.raises(ConfigError, match=r"'dataset' has no score"):
        usable_task(replace(config, rewards=[RewardConfig("task")]))
    wrong, right = (
        replace(config, rewards=[RewardConfig("exact_match", options=each)]) for each in ({}, {"column": "gold"})
    )
    with pytest.raises(ConfigError, match=r"needs the column answer, which task dataset does not have; it has: gold"):
        require_columns(wrong, usable_task(wrong).item(0))
    require_columns(right, usable_task(right).item(0))
    with pytest.raises(ConfigError, match="needs the column gold, which task addition does not have; it has: answer"):
        usable_task(replace(right, task=TaskConfig("addition")))
    data.write_text('{"q": "1", "prompts": 1}\n')
    taken = replace(config, rewards=[RewardConfig("reward_samples:soon")])
    with pytest.raises(ConfigError, match="has a column prompts, a name that rewards are given something else by"):
        require_columns(taken, usable_task(taken).item(0))


def test_what_needs_the_tasks_own_score_is_refused_with_rewards_that_leave_it_out(tmp_path):
    config = compose("tiny", ["task.name=distillation", "+task.options={teacher: 'http://h', task: addition}"])
    trainer = replace(config.trainer, advantage=AdvantageConfig("distillation"))
    config = replace(config, trainer=trainer, rewards=[RewardConfig("length", options={"target": 1})])
    with pytest.raises(ConfigError, match=r"with these rewards: it needs the task's own score; add one named task"):
        preflight._require_task(config)
    preflight._require_task(replace(config, rewards=[*config.rewards, RewardConfig("task")]))
    own = [RewardConfig("reward_samples:soon")]  # is looked at in a child process
    with pytest.raises(ConfigError, match=r"with these rewards: it needs the task's own score; add one named task"):
        preflight._require_task(replace(config, rewards=own))


def test_a_file_of_rewards_is_found_from_any_folder(monkeypatch):
    monkeypatch.chdir(HERE)
    placed = preflight._reward(RewardConfig("reward_samples.py:odd", weight=2.0))
    assert placed == RewardConfig(f"{HERE}/reward_samples.py:odd", weight=2.0)
    assert preflight._reward(RewardConfig("math")) == RewardConfig("math")
    overrides = ["rewards=[{name: reward_samples.py:share, weight: 2, options: {leter: 1}}]"]
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.options\.leter is not an option: did you mean letter\?$"):
        preflight._require_task(compose("tiny", overrides))


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_each_rewards_mean_is_in_the_steps_line():
    group = make_group("q0", 2)
    first, second = group.rollouts
    rollouts = [
        msgspec.structs.replace(first, rewards={"math": 1.0, "length": 0.5}),
        msgspec.structs.replace(second, rewards={"math": 0.0}, unscored="reward math timeout"),
    ]
    gated = gate_group(msgspec.structs.replace(group, rollouts=rollouts), 0, make_config("r").gate)
    line = rewards_and_lags([gated], [0.5], NoBatch())
    assert line["rewards"] == {"length": 0.5, "math": 0.5}
    assert line["rewards_applied"] == {"length": 0.5, "math": 1.0}
    assert line["unscored"] == {"reward math timeout": 1}
    assert "rewards" not in rewards_and_lags([gate_group(group, 0, make_config("r").gate)], [0.5], NoBatch())
    assert defect(msgspec.structs.replace(group, rollouts=rollouts), 2, 100) is None
    broken = msgspec.structs.replace(first, rewards={"math": float("nan")})
    assert defect(msgspec.structs.replace(group, rollouts=[broken, second]), 2, 100) == "malformed: reward"


class NoBatch:
    def lag_counts(self):
        return {}
