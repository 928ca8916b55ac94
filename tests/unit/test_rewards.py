"""Rewards by name: which function, with which options and columns; and the values of those that are built in."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import make_config

from inflight.config import ConfigError, RewardConfig
from inflight.rewards import RewardError, Samples, make
from inflight.rewards.base import text_of
from inflight.rewards.judge import AT_ONCE
from inflight.rewards.match import last_number

HERE = Path(__file__).parent


def reward(name, **options):
    return make(RewardConfig(name, options=options), "rewards[0]")


def samples(*completions, ids=(), prompt="?", **columns):
    count = len(completions)
    return Samples(list(completions), [list(ids)] * count, prompt, ["stop"] * count, columns)


def values(given, *completions, **more):
    return asyncio.run(given.values(samples(*completions, **more)))


def value(given, completion, **more):
    (found,) = values(given, completion, **more)
    return found


# --- which function, with what ---------------------------------------------------------------------------------------


def test_a_function_gets_what_it_asks_for():
    assert value(reward("reward_samples:columns_seen"), "text", answer="4", other=[1]) == 1.0
    assert value(reward("reward_samples:share", letter="b"), "abb", answer="1234", unused=1) == 0.5
    found = reward("reward_samples:soon")
    assert found.asynchronous
    assert value(found, "abc") == 3.0
    assert value(found, "none") is None


def test_a_function_gets_all_completions_of_a_question():
    assert values(reward("reward_samples:columns_seen"), "a", "b", answer="4", other=[1]) == [1.0, 1.0]
    assert values(reward("reward_samples:rank"), "aaa", "", "a", answer="4") == [0.0, None, 0.5]
    assert values(reward("reward_samples:rare"), "a", "b", "a") == [0.5, 1.0, 0.5]
    assert values(reward("exact_match"), "4", "5", "4", answer="4") == [1.0, 0.0, 1.0]
    with pytest.raises(RewardError, match="one value for each completion: 1 for 2"):
        values(reward("reward_samples:odd"), "a", "b")


def test_which_rewards_look_at_a_whole_group():
    wanted = {"reward_samples:rank": True, "my_rewards.py:short": True, "math": False}
    assert {name: RewardConfig(name).of_group for name in wanted} == wanted
    assert not RewardConfig("reward_samples:rank", per="completion").of_group
    assert RewardConfig("judge", per="group").of_group
    with pytest.raises(ConfigError, match=r"rewards \(math\): per='all' is not allowed: group, completion"):
        RewardConfig("math", per="all")
    with pytest.raises(ConfigError, match=r"rewards \(task\): per is not allowed"):
        RewardConfig("task", per="group")


def test_a_users_file_and_class():
    path = str(HERE / "reward_samples.py")
    assert value(reward(f"{path}:share"), "aa", answer="1") == 2.0
    found = reward("reward_samples:Own", factor=2)
    assert found.needs == {"answer"}
    assert value(found, "", answer="3") == 6.0
    assert value(reward(f"{path}:Own", factor=2.0, column="x"), "", x=1) == 2.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exact_match", {}),
        ("numeric_match", {}),
        ("math", {}),
        ("reward_samples:Unnamed", {}),
        ("regex", {"pattern": "4"}),
    ],
)
def test_a_column_may_have_the_name_of_an_object_of_ones_own(name, options):
    given = reward(name, **options)
    assert not given.refuses
    assert value(given, "4", answer="4", self="5") == 1.0


def test_a_column_with_which_a_class_can_not_be_called_is_known():
    assert reward("reward_samples:Own", factor=2).refuses == {"self"}
    assert reward("length", target=3).refuses == set(), "it is given no column"
    assert reward("reward_samples:share").refuses == reward("reward_samples:columns_seen").refuses == set()


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        ("float", "no list"),
        ("text", "no list"),
        ("texts", "no number"),
        ("numpy texts", "no number"),
        ("two", "length"),
    ],
)
def test_a_result_of_another_kind_is_reported(completion, kind):
    with pytest.raises(RewardError) as raised:
        value(reward("reward_samples:odd"), completion)
    assert raised.value.kind == kind


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(RewardError, match="no column solution, it has: answer, x"):
        value(reward("exact_match", column="solution"), "4", answer="4", x=1)
    with pytest.raises(RewardError, match="no column answer"):
        value(reward("reward_samples:share"), "4")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("numeric_mach", {}, r"^rewards\[0\]\.name='numeric_mach' is not known: did you mean numeric_match\?$"),
        ("xyz", {}, r"rewards\[0\]\.name='xyz' is not known: exact_match, .*, task, package\.module:function"),
        ("no_such_module:f", {}, "can't be imported: No module named"),
        ("reward_samples:absent", {}, "name='reward_samples:absent': reward_samples has no function absent"),
        ("/nowhere/r.py:f", {}, "/nowhere/r.py is not a file"),
        ("reward_samples:NO_FUNCTION", {}, "reward_samples has no function NO_FUNCTION"),
        ("reward_samples:Failing", {}, "can't be made: OSError: no disk .*reward_samples.py, line"),
        (
            "reward_samples:share",
            {"leter": "b"},
            r"rewards\[0\]\.options\.leter is not an option: did you mean letter\?$",
        ),
        ("reward_samples:share", {"completions": []}, "options.completions is not an option"),
        ("reward_samples:Own", {}, r"options\.factor is missing"),
        ("exact_match", {"colum": "x"}, r"options\.colum is not an option: did you mean column\?$"),
        ("exact_match", {"strip": 1}, r"options\.strip=1 is not allowed: it takes bool"),
        ("exact_match", {"pattern": "("}, r"rewards\[0\] \(exact_match\): options\.pattern='\(' is not a regular expr"),
        ("numeric_match", {"tolerance": -1.0}, "tolerance=-1.0 is not allowed: 0 or more"),
        ("regex", {}, "options.pattern is missing"),
        ("regex", {"pattern": "a", "flags": "iq"}, "flags='iq' is not allowed: letters of imsx"),
        ("format", {}, "either tags, or json"),
        ("format", {"tags": ["a"], "json": []}, "either tags, or json"),
        ("format", {"tags": ["a b"]}, "names of tags"),
        ("length", {"target": 0}, "target=0 is not allowed: 1 token or more"),
        ("overlong", {"longest": 10, "buffer": 11}, "buffer=11 is not allowed: 1 token up to options.longest"),
        ("math", {"precision": 31}, "0 to 30"),
        ("judge", {"url": "127.0.0.1", "model": "m"}, "url='127.0.0.1' is not allowed: http://"),
        ("judge", {"url": "http://u:p@h", "model": "m"}, r"options\.url='…@…' is not allowed"),
        ("judge", {"url": "http://h", "model": "m", "prompt": "{prompt}"}, "a text with {completion}"),
        ("judge", {"url": "http://h", "model": "m", "prompt": "{completion"}, "malformed"),
        ("judge", {"url": "http://h", "model": "m", "prompt": "{completion.x}"}, "plain names in braces"),
        ("judge", {"url": "http://h", "model": "m", "pattern": "score"}, "whose first group is the score"),
        ("judge", {"url": "http://h", "model": "m", "out_of": 0.0}, "other than 0"),
        ("judge", {"url": "http://h", "model": "m", "api_key_env": "NOT_THERE_7"}, "'NOT_THERE_7' .*variable that is"),
    ],
)
def test_what_cannot_be_made_is_one_line(name, options, says):
    with pytest.raises(ConfigError, match=says) as raised:
        reward(name, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("when", ["imported", "made"])
def test_a_file_that_ends_its_process_is_one_line(tmp_path, when):
    """As a script without a guard does, with code 0."""
    ends = "import sys; sys.exit(0)"
    body = "from dataclasses import dataclass\n@dataclass\nclass R:\n    def __call__(self, **_): ...\n"
    body += ends if when == "imported" else f"    def __post_init__(self): {ends}"
    (tmp_path / "script.py").write_text(body)
    with pytest.raises(ConfigError, match=rf"^rewards\[0\]\.name='.*script\.py:R' can't be {when}: SystemExit: 0 \("):
        make(RewardConfig(f"{tmp_path}/script.py:R"), "rewards[0]")


def test_a_key_in_place_of_its_variables_name_is_not_repeated():
    with pytest.raises(ConfigError) as raised:
        reward("judge", url="http://h", model="m", api_key_env="sk-secret-7")
    assert "secret" not in str(raised.value)


# --- the built-in ones -----------------------------------------------------------------------------------------------


def test_dates_and_decimals_of_a_table_are_compared_as_their_texts():
    plain = reward("exact_match")
    assert values(plain, "2026-03-01", "2026-3-1", answer=date(2026, 3, 1)) == [1.0, 0.0]
    assert value(plain, "2026-03-01T12:30:00", answer=datetime(2026, 3, 1, 12, 30)) == 1.0
    assert values(plain, "12.50", "12.5", answer=Decimal("12.50")) == [1.0, 0.0]
    assert values(plain, "12", "12.00", answer=Decimal("12.00")) == [1.0, 1.0]
    assert value(plain, "NaN", answer=Decimal("NaN")) == 1.0
    assert values(plain, "0", "sNaN", answer=Decimal("sNaN")) == [0.0, 1.0]
    assert value(plain, "12", answer=[Decimal("sNaN"), Decimal("12.0")]) == 1.0
    assert values(reward("numeric_match"), "so 12.5", "1", answer=Decimal("12.50")) == [1.0, 0.0]


def test_exact_match():
    plain = reward("exact_match")
    assert [value(plain, text, answer="Paris") for text in (" Paris\n", "paris", "Paris!")] == [1.0, 0.0, 0.0]
    assert value(plain, "b", answer=["a", "b"]) == 1.0
    assert value(plain, "7", answer=7) == 1.0
    assert value(plain, "x", answer=None) is None
    written = ("12", "12.0", "12.00", "13", "12.5")
    assert [value(plain, text, answer=12.0) for text in written] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [value(plain, text, answer=12.5) for text in written] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert value(plain, "12", answer=[1.5, 12.0]) == 1.0
    assert value(plain, "nan", answer=math.nan) == 1.0
    loose = reward("exact_match", column="city", ignore_case=True, pattern=r"<answer>(.*?)</answer>")
    assert value(loose, "<answer>Rome</answer> no: <answer>PARIS</answer>", city="Paris") == 1.0
    assert value(loose, "Paris", city="Paris") == 0.0
    assert value(reward("exact_match", strip=False), "a ", answer="a") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 1,234,567.5 in all.", 1234567.5),
        ("between 3 and -4", -4.0),
        ("#### 42", 42.0),
        ("1e3", 1000.0),
        ("x = .5", 0.5),
        ("5.", 5.0),
        ("1,2,3", 3.0),
        ("12,34", 34.0),
        ("$1,000", 1000.0),
        ("2.5%", 2.5),
        ("1e999", None),
        ("1e5e1", 1.0),
        ("2e3.e4", 4.0),
        ("1e2e2.1", 2.1),
        ("none, - . ,", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@given(st.text("01,.eE+- x"))
def test_a_text_that_a_model_wrote_has_a_last_number_or_none(text):
    """A completion can hold anything: an exception in the search for its number would cost the whole group."""
    found = last_number(text)
    assert found is None or math.isfinite(found)


def test_numeric_match():
    plain = reward("numeric_match")
    assert value(plain, "so 40 + 2 = 42.", answer="6 * 7 = 42 #### 42") == 1.0
    assert value(plain, "41", answer=42) == 0.0
    assert value(plain, "no idea", answer=42) == 0.0
    assert value(plain, "42", answer=None) is None
    assert value(reward("numeric_match", tolerance=0.01), "3.14", answer=math.pi) == 1.0
    assert value(reward("numeric_match", tolerance=0.01), "3.18", answer=math.pi) == 0.0
    assert value(plain, "3.14", answer=math.pi) == 0.0
    assert value(reward("numeric_match", pattern=r"answer: (\S+)"), "answer: 7, of 9", answer=7) == 1.0
    for wrong in ("abc", math.nan, math.inf, -math.inf, "1e999"):  # any number would be within a share of infinity
        with pytest.raises(ValueError, match=f"column answer holds no number: '{wrong}'"):
            value(plain, "7", answer=wrong)


def test_regex():
    assert value(reward("regex", pattern="b+"), "abbc") == 1.0
    assert value(reward("regex", pattern="B+", whole=True), "abbc") == 0.0
    assert value(reward("regex", pattern="^A.C$", flags="is"), "a\nc") == 1.0


def test_format_of_tags():
    both = reward("format", tags=["think", "answer"])
    fine = "<think>a\nb</think>\n<answer>c</answer>\n"
    wrong = [
        "<answer>c</answer><think>a</think>",
        f"{fine} and more",
        "<think>a<answer>c</answer></think>",
        "<think>a</think><think>b</think><answer>c</answer>",
        "<think>a</think><answer>c",
        "",
    ]
    assert value(both, fine) == 1.0
    assert [value(both, text) for text in wrong] == [0.0] * len(wrong)
    opened = reward("format", tags=["think", "answer"], opened=True)
    assert value(opened, fine.removeprefix("<think>")) == 1.0
    assert value(opened, fine) == 0.0


def test_format_of_json():
    keys = reward("format", json=["name"])
    texts = ('{"name": 1, "x": 2}', '{"x": 2}', "[1]", "{", "[" * 100_000)
    assert [value(keys, text) for text in texts] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert value(reward("format", json=[]), "{}") == 1.0


def test_length():
    assert value(reward("length", target=4), "", ids=[1]) == 0.25
    assert value(reward("length", target=4), "", ids=range(9)) == 1.0
    assert value(reward("length", target=4, shorter=True), "", ids=[1]) == 0.75


def test_overlong_is_dapos():
    """Equation 13 of arXiv 2503.14476 with its own numbers: L_max 20480, L_cache 4096."""
    found = reward("overlong", longest=20480, buffer=4096)
    lengths = (0, 16384, 16385, 18432, 20480, 20481, 30000)
    assert [value(found, "", ids=range(each)) for each in lengths] == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0]


def test_math():
    found = reward("math")
    right = ["\\boxed{\\frac{1}{2}}", "so the answer is $0.5$", "1/2", "thus \\boxed{\\frac{2}{4}}."]
    assert [value(found, text, answer="\\frac{1}{2}") for text in right] == [1.0] * 4
    assert value(found, "\\boxed{\\frac{1}{3}}", answer="\\frac{1}{2}") == 0.0
    assert value(found, "I do not know", answer="$x^2+1$") == 0.0
    assert value(found, "$\\{1, 2\\}$", answer="\\{2,1\\}") == 1.0
    assert value(found, "$1 + x^2$", answer="$x^2+1$") == 1.0
    assert value(found, "7", answer=7) == 1.0
    assert value(found, "7", answer=None) is None
    assert value(found, "7", answer="") is None
    boxed = reward("math", boxed=True)
    assert value(boxed, "it is 7", answer="7") == 0.0
    assert value(boxed, "it is \\boxed{7}", answer="7") == 1.0


# --- the judge -------------------------------------------------------------------------------------------------------


class JudgeServer:
    """A chat endpoint that says `text` with `status`, and notes what it was asked."""

    def __init__(self, text="Score: 8", status=200, wait_s=0.0):
        self.text, self.status, self.wait_s, self.asked, self.keys = text, status, wait_s, [], []

    async def answer(self, request):
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        await asyncio.sleep(self.wait_s)
        body = {"choices": [{"message": {"role": "assistant", "content": self.text}}]} if self.status == 200 else None
        return web.Response(status=self.status, body=json.dumps(body or {"refused": self.keys[-1]}))

    def ask(self, given, **options):
        """The reward's value, or what it raises."""

        async def main():
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]
            try:
                found = reward("judge", url=f"http://127.0.0.1:{port}/v1/", model="j", **options)
                assert found.asynchronous
                scores = await found.values(given)
                return scores[0] if len(scores) == 1 else scores
            finally:
                await runner.cleanup()

        return asyncio.run(main())


def test_a_judge_is_asked_and_its_score_found(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY_7", "sk-7")
    server = JudgeServer("First I thought score: 2. Score: 7.5")
    given = samples("Paris {x}", prompt=[{"role": "user", "content": "Capital?"}], answer="Paris")
    options = {"prompt": "{prompt} {completion} {answer} {{}}", "system": "Be fair.", "api_key_env": "JUDGE_KEY_7"}
    assert server.ask(given, **options) == 0.75
    assert server.keys == ["Bearer sk-7"]
    (asked,) = server.asked
    assert asked["model"] == "j"
    assert [each["content"] for each in asked["messages"]] == ["Be fair.", "Capital? Paris {x} Paris {}"]


class JudgesTogether(JudgeServer):
    """Answers none of four requests before all have come; each completion is its own score."""

    async def answer(self, request):
        barrier = self.barrier = getattr(self, "barrier", None) or asyncio.Barrier(4)
        asked = (await request.json())["messages"][-1]["content"]
        await barrier.wait()
        if asked == self.text:
            return web.Response(status=500)
        body = {"choices": [{"message": {"role": "assistant", "content": f"Score: {asked}"}}]}
        return web.Response(body=json.dumps(body))


def test_a_judge_is_asked_for_all_completions_of_a_group_at_once():
    group = samples("1", "2", "3", "4")
    assert JudgesTogether().ask(group, prompt="{completion}") == [0.1, 0.2, 0.3, 0.4]
    with pytest.raises(RuntimeError, match="http 500"):
        JudgesTogether("3").ask(group, prompt="{completion}")


class JudgeThatCounts(JudgeServer):
    """Each completion is its own score; the later ones are answered first."""

    together = most = 0

    async def answer(self, request):
        self.together += 1
        self.most = max(self.most, self.together)
        asked = (await request.json())["messages"][-1]["content"]
        await asyncio.sleep(0.3 / int(asked))
        self.together -= 1
        body = {"choices": [{"message": {"role": "assistant", "content": f"Score: {asked}"}}]}
        return web.Response(body=json.dumps(body))


def test_a_judge_is_not_asked_for_more_of_a_group_than_it_may_be_at_once():
    server, group = JudgeThatCounts(), range(1, 2 * AT_ONCE + 2)
    assert server.ask(samples(*map(str, group)), prompt="{completion}", out_of=1.0) == [float(each) for each in group]
    assert server.most == AT_ONCE


def test_a_judge_is_not_shown_an_empty_question_in_place_of_token_ids():
    server = JudgeServer()
    with pytest.raises(RuntimeError, match="prompt is token ids: name a column"):
        server.ask(samples("x", prompt=[3, 4]))
    assert not server.asked
    assert server.ask(samples("x", prompt=[3, 4], question="1+1="), prompt="{question}{completion}") == 0.8


def test_a_judge_without_a_score_or_an_answer_says_so(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY_7", "sk-secret-7")
    with pytest.raises(RuntimeError, match="no score in the judge's answer: 'fine'"):
        JudgeServer("fine").ask(samples("x"))
    with pytest.raises(RuntimeError, match="http 401") as raised:
        JudgeServer(status=401).ask(samples("x"), api_key_env="JUDGE_KEY_7")
    assert "secret" not in str(raised.value), "the server repeated the key"
    with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
        JudgeServer(wait_s=5.0).ask(samples("x"), timeout_s=0.2)
    with pytest.raises(RuntimeError, match="ClientConnectorError"):
        value(reward("judge", url="http://127.0.0.1:1", model="j"), "x")


def test_a_judges_prompt_names_columns():
    assert reward("judge", url="http://h", model="m", prompt="{completion} {gold}").needs == {"gold"}


def test_a_prompt_as_text():
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert text_of(chat) == "system: S\n\nuser: U"
    parts = [{"type": "text", "text": "U"}, {"type": "image_url"}, {"type": "text", "text": "V"}]
    assert text_of([{"role": "user", "content": parts}]) == "U\nV"
    assert text_of([*chat, {"role": "user", "content": parts[:1]}]) == "system: S\n\nuser: U\n\nuser: U"
    assert text_of([3, 4]) == ""
    assert text_of("plain") == "plain"


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([RewardConfig("regex"), RewardConfig("regex")], r"rewards\[1\]: regex is there already"),
        ([RewardConfig("regex", weight=0.0)], "all weights are 0"),
        ([RewardConfig("length")] * 65, "at most 64"),
    ],
)
def test_rewards_that_do_not_go_together_are_refused(tmp_path, entries, says):
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(make_config(tmp_path), rewards=entries)


def test_a_reward_is_checked_by_itself():
    assert RewardConfig("a.b:f").known_as == "f"
    assert RewardConfig("dir/x.py:g").known_as == "g"
    with pytest.raises(ConfigError, match=r"rewards \(regex\): weight=nan is not allowed"):
        RewardConfig("regex", weight=math.nan)
    with pytest.raises(ConfigError, match=r"label='a b' is not allowed"):
        RewardConfig("regex", label="a b")
    with pytest.raises(ConfigError, match=r"rewards \(task\): options are not allowed"):
        RewardConfig("task", options={"x": 1})
