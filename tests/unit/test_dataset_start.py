"""A run on a user's own data, before it starts and when it resumes: what is wrong with the data is one line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace

import datasets
import pytest
from test_dataset import lines, sums
from test_prompts import TEMPLATE

from inflight import config as configuration
from inflight.actor.calls import MakeTask
from inflight.actor.services import service_of
from inflight.config import ConfigError
from inflight.launcher import preflight
from inflight.launcher.compose import compose
from inflight.launcher.resume import resumed_config
from inflight.launcher.run_folder import RunFolder
from inflight.models import prepare
from inflight.prompts import ModelTokens
from inflight.resources import folder as shipped
from inflight.tasks import make
from inflight.tasks.addition import Addition
from inflight.tasks.count import PromptLengths, left_out
from inflight.tasks.data.chat_template import text_of
from inflight.tasks.data.rows import is_of_files
from inflight.tasks.examine import examine
from inflight.tasks.row_limit import within


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing of this machine's cache is read, in processes that are started neither."""
    folder = str(tmp_path_factory.getbasetemp() / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", folder)


LONG_S = 3600.0


def template(folder):
    (folder / "t.jinja").write_text(TEMPLATE)
    return folder / "t.jinja"


def run(folder, *more, rows=None, **options):
    """The configuration of a run on a file of chats, as the launcher composes it."""
    file = folder / "data.jsonl"
    if rows is not None:
        lines(file, rows)
    given = {"path": file, "messages": "messages", "chat_template": template(folder)} | options
    return compose(
        "tiny",
        [
            "task.name=dataset",
            "rewards=[{name: exact_match}]",
            f"run_dir={folder}/run",
            *more,
            *(f"+task.options.{name}={value}" for name, value in given.items() if value is not None),
        ],
    )


def chats(count, **more):
    return [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} | more for n in range(count)]


def examined(config):
    """The configuration with what an examination in this process finds."""
    found = examine(config, make(config.task, config.seed))
    return replace(config, task=replace(config.task, options=found.options, contents=found.contents))


def test_the_launcher_keeps_what_the_data_hold(tmp_path, monkeypatch):
    """In a process of its own, as at each start."""
    monkeypatch.chdir(tmp_path)
    config = preflight.with_data(run(tmp_path, rows=chats(5), path="data.jsonl"))
    assert config.task.options["path"] == str(tmp_path / "data.jsonl")
    assert set(config.task.contents) == {"task.options.path", "task.options.chat_template", "model.chat_template"}
    assert config == examined(config)
    configuration.save(config)
    assert configuration.load(config.run_dir).task == config.task
    assert preflight.with_data(compose("tiny", [])).task.contents == {}, "a task without files has none"


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (chats(3), {"messages": "mesages"}, r"data\.jsonl, line \d: there is no column 'mesages'; there are: messages"),
        (chats(3), {"messages": None, "prompt": "answer", "system": "x", "chat": True}, "TemplateError: no system"),
        (chats(3), {"chat_template": None}, r"has no chat template; name a file with one in task"),
        (["{", "["], {}, r"the first 2 questions can't be asked; the first: NotJson: .*data\.jsonl, line \d: it"),
        ([{"messages": [{"role": "user", "content": "1" * 300}]}], {}, "the only question .* tokens, and generator"),
        ([], {}, "is empty: it has no row"),
    ],
)
def test_data_without_a_question_that_can_be_asked_are_refused(tmp_path, rows, options, says):
    config = run(tmp_path, rows=rows, **options)
    with pytest.raises(ConfigError, match=says) as caught:
        examined(config)
    assert "\n" not in str(caught.value)


def test_a_refusal_is_the_launchers_one_line(tmp_path):
    says = r"^task\.options\.path='.*/none\.jsonl' does not exist: no file has that name$"
    with pytest.raises(ConfigError, match=says):
        preflight.with_data(run(tmp_path, path=tmp_path / "none.jsonl"))


def test_a_relative_path_that_is_none_is_refused_with_the_folder_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        preflight.with_data(run(tmp_path, path="none.jsonl"))
    assert str(refused.value).endswith(f"path='none.jsonl' does not exist: no file has that name in {tmp_path}")


@pytest.mark.parametrize("path", ["~no-such-user/data", "n" * 300, "a\0b"])
def test_a_path_that_leads_nowhere_is_no_file(path):
    assert not is_of_files(path)


def test_a_chat_template_in_the_home_of_an_unknown_user_does_not_exist():
    with pytest.raises(FileNotFoundError):
        text_of("~no-such-user/a.jinja")


def test_some_rows_that_are_none_are_no_reason_to_refuse(tmp_path):
    config = examined(run(tmp_path, rows=["{", *chats(1), "["], columns="[answer]"))
    assert config.task.contents


def test_what_does_not_suit_the_size_of_the_data_is_printed(tmp_path, capsys):
    """Of 20 rows 5 are held out: 15 in each of two epochs are enough for 7 steps of 4."""
    more = ("task.epochs=2", "trainer.steps=8", "trainer.groups_per_step=4", "trainer.warmup_steps=8", "eval.every=2")
    preflight.with_data(run(tmp_path, *more, rows=chats(20), held_out=0.25))
    schedule, few = capsys.readouterr().err.splitlines()
    assert schedule.startswith("inflight launch: the data are enough for 7 of trainer.steps=8 (30 questions over ")
    assert few.startswith("inflight launch: an evaluation asks 5 questions (task.options.held_out=0.25), fewer than")


def test_what_will_be_left_out_is_counted_and_printed(tmp_path, monkeypatch, capsys):
    rows = [*chats(4), {"messages": [{"role": "user", "content": "1" * 30}], "answer": "1"}, "{", "[", "{"]
    config = run(tmp_path, "rollout.max_prompt_tokens=20", rows=rows, shuffle="false")
    says = (
        "of 8 questions, 4 will be left out: 1 longer than 20 tokens, 3 that can't be asked"
        " (NotJson: data.jsonl, line 6, and 2 more)"
    )
    look, looks = preflight._look, []
    monkeypatch.setattr(preflight, "_look", lambda *a, **more: looks.append(look(*a, **more)) or looks[-1])
    assert preflight.with_data(config).task.contents
    assert capsys.readouterr().err == f"inflight launch: {says}\n"
    # A row on which no signal ends a tokenizer: the child process is killed after its time, and what it wrote stays.
    monkeypatch.setattr(preflight, "_look", lambda *_, **__: replace(looks[0], code=None))
    with pytest.raises(ConfigError, match=r"within rollout\.task_start_timeout_s=300; .* looked at: question 8$"):
        preflight.with_data(config)
    task, tokens = make(config.task, 0), ModelTokens(config.model.name)
    ticks = iter(range(100))
    says = "of the first 5 of 8 questions, "
    lengths = PromptLengths(tokens, LONG_S)
    assert left_out(task, lengths, 3, within_s=6, clock=lambda: next(ticks)).startswith(says)
    assert examine(run(tmp_path, rows=chats(4)), make(config.task, 0)).left_out == ""
    assert left_out(Addition(seed=0), lengths, 1) == "", "a task without an end"


def test_the_class_of_what_a_row_raises_does_not_break_the_line(tmp_path):
    class Odd(Addition):
        def __len__(self):
            return 2

        def item(self, index):
            raise type("Broken\nin two\x1b[2J", (Exception,), {})

    config = run(tmp_path, rows=chats(1))
    said = left_out(Odd(seed=0), PromptLengths(ModelTokens(config.model.name), LONG_S), 1)
    assert said == "of 2 questions, 2 will be left out: 2 that can't be asked (Broken in two [2J)"


@pytest.mark.parametrize("hanging", [lambda: time.sleep(LONG_S), lambda: re.match("(a|a)*$", "a" * 60 + "b")])
def test_what_takes_too_long_is_interrupted(hanging):
    handler = signal.getsignal(signal.SIGALRM)

    def swallowed():
        with contextlib.suppress(Exception):
            hanging()

    with pytest.raises(TimeoutError, match=r"^it takes longer than rollout\.reward_timeout_s=0\.01$"):
        within(0.01, swallowed)
    assert within(LONG_S, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        within(LONG_S, lambda: 1 // 0)
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]) == (handler, 0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_a_destructor_loses_is_repeated():
    class Slow:
        def __del__(self):
            time.sleep(LONG_S)

    def call():
        Slow()
        time.sleep(LONG_S)

    with pytest.raises(TimeoutError):
        within(0.01, call)


@pytest.mark.parametrize("at", ["first", "later"])
def test_a_row_on_which_the_template_hangs_costs_itself(tmp_path, at):
    """The signal of the limit comes from this test, in the middle of that row, so that no other row is timed."""
    forever = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% for _ in range(99999) %}" + "{% endfor %}" * 3
    (tmp_path / "hang.jinja").write_text(f"{{% if messages[0].content == '9' %}}{forever}{{% endif %}}{TEMPLATE}")
    rows = chats(4)
    hanging = 0 if at == "first" else 2
    rows[hanging]["messages"][0]["content"] = "9"
    limits = [f"rollout.reward_timeout_s={LONG_S}", f"rollout.task_start_timeout_s={LONG_S}"]
    config = run(tmp_path, *limits, rows=rows, chat_template=tmp_path / "hang.jinja", shuffle="false")

    before, overs = signal.getsignal(signal.SIGALRM), []

    def interrupt(over):
        while signal.getsignal(signal.SIGALRM) is before:  # it would end this process
            time.sleep(0.01)
        over.wait(0.2)
        while not over.is_set():
            os.kill(os.getpid(), signal.SIGALRM)
            over.wait(5)

    def asked(which):
        for over in overs:
            over.set()
        if which == f"question {hanging + 1} (dataset:{hanging + 1})":
            overs.append(threading.Event())
            threading.Thread(target=interrupt, args=overs[-1:], daemon=True).start()

    found = examine(config, make(config.task, config.seed), asked)
    asked("nothing")
    why = f"TimeoutError: data.jsonl, line {hanging + 1}"
    assert found.left_out == f"of 4 questions, 1 will be left out: 1 that can't be asked ({why})"


def test_rows_that_a_reward_cannot_score_are_counted_with_the_column_and_the_first_of_them(tmp_path):
    more = ({"answer": 1, "x": 1}, {"answer": 2}, {"x": 1}, {"x": 2}, {"answer": None, "x": 3})
    rows = [{"messages": chats(1)[0]["messages"]} | each for each in more]
    rows.insert(1, "{")
    needs_x = "{name: exact_match, label: other, options: {column: x}}"
    config = run(tmp_path, f"rewards=[{{name: numeric_match}}, {needs_x}, {{name: task}}]", rows=rows, shuffle="false")
    assert examine(config, make(config.task, config.seed)).left_out == (
        "of 6 questions, 1 will be left out: 1 that can't be asked (NotJson: data.jsonl, line 2);"
        " 3 can't be scored: reward numeric_match needs the column answer (data.jsonl, line 4, and 1 more),"
        " reward other needs the column x (data.jsonl, line 3)"
    )
    config = run(tmp_path, "rewards=[{name: numeric_match}]", rows=[rows[0], rows[3]], shuffle="false")
    says = "of 2 questions, 1 can't be scored: reward numeric_match needs the column answer (data.jsonl, line 2)"
    assert examine(config, make(config.task, config.seed)).left_out == says


def test_a_column_that_a_reward_needs_must_be_there(tmp_path):
    says = r"rewards\[0\] needs the column answer, which task dataset does not have; it has: none"
    with pytest.raises(ConfigError, match=says):
        examined(run(tmp_path, rows=[{"messages": chats(1)[0]["messages"]}]))
    other = lines(tmp_path / "other.jsonl", [{"messages": chats(1)[0]["messages"]}])
    with pytest.raises(ConfigError, match=says):
        examined(run(tmp_path, rows=chats(3), held_out_path=other))


def test_a_column_that_a_reward_can_not_be_given_is_named(tmp_path):
    """Its `__call__` takes all columns, and has that name for its own object."""
    rows = chats(3, self=1)
    examined(run(tmp_path, rows=rows))
    examined(run(tmp_path, "rewards=[{name: 'reward_samples:share'}]", rows=rows))
    own = "rewards=[{name: exact_match}, {name: 'reward_samples:Own', options: {factor: 1}}]"
    says = r"^rewards\[1\]\.name='reward_samples:Own' can't be given the column self, a name that its __call__ has for"
    with pytest.raises(ConfigError, match=says):
        examined(run(tmp_path, own, rows=rows))
    examined(run(tmp_path, own, rows=rows, columns="[answer]"))


def test_an_evaluation_needs_questions_that_are_held_out(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.every is set, and task\.name=dataset holds no question out"):
        examined(run(tmp_path, "eval.every=2", rows=chats(3)))
    examined(run(tmp_path, "eval.every=2", "eval.questions=1", rows=chats(3), held_out=0.4))
    with pytest.raises(
        ConfigError, match=r"^eval\.questions=2 is not allowed: 1 to 1, .* task\.name=dataset holds out"
    ):
        examined(run(tmp_path, "eval.every=2", "eval.questions=2", rows=chats(3), held_out=0.4))


def test_questions_held_out_are_looked_at_too(tmp_path):
    other = lines(tmp_path / "other.jsonl", [{"question": "1"}])
    with pytest.raises(ConfigError, match=r"the only held-out question can't be asked.*other\.jsonl, line 1"):
        examined(run(tmp_path, rows=chats(3), held_out_path=other))


# --- a run that resumes ---


@pytest.fixture
def begun(tmp_path):
    config = examined(run(tmp_path, rows=chats(5)))
    with RunFolder(config):
        configuration.save(config)
    return config


def resume(folder, *more, **options):
    """What the launcher does when a run resumes, up to where it would start processes."""
    config = examined(resumed_config(run(folder, "resume=true", *more, **options)))
    with RunFolder(config) as run_folder:
        return run_folder.config


def test_a_run_resumes_with_the_same_data_wherever_they_are(begun, tmp_path):
    assert resume(tmp_path).task == begun.task
    moved = tmp_path / "elsewhere.jsonl"
    shutil.move(tmp_path / "data.jsonl", moved)
    found = resume(tmp_path, path=moved).task
    assert (found.options["path"], found.contents) == (str(moved), begun.task.contents)


def change_the_file(folder):
    lines(folder / "data.jsonl", chats(5, level=1))


def change_the_template(folder):
    (folder / "t2.jinja").write_text(TEMPLATE + " ")


@pytest.mark.parametrize(
    ("change", "options", "more", "says"),
    [
        (change_the_file, {}, [], r"task\.options\.path='.*data\.jsonl' does not hold .* with \d+ bytes, \w+, now"),
        (change_the_template, {"chat_template": "t2.jinja"}, [], r"task\.options\.chat_template='.*t2.jinja' does not"),
        (None, {"held_out": 0.4}, [], r"task\.options\.held_out=0\.4 is not allowed: .* began with its default"),
        (None, {"columns": "[answer]"}, [], r"task\.options\.columns=\['answer'\] is not allowed"),
        (None, {"shuffle": "false"}, [], r"task\.options\.shuffle=False is not allowed"),
        (None, {}, ["task.epochs=3"], r"task\.epochs=3 is not allowed: the run in .* began with 1"),
        (None, {}, ["seed=3"], r"seed=3 is not allowed: the run in .* began with 0"),
    ],
)
def test_a_resume_with_other_data_is_refused_by_what_differs(begun, tmp_path, monkeypatch, change, options, more, says):
    monkeypatch.chdir(tmp_path)
    if change is not None:
        change(tmp_path)
    with pytest.raises(ConfigError, match=says) as caught:
        resume(tmp_path, *more, **options)
    assert "\n" not in str(caught.value)


def test_another_template_of_the_model_is_other_data(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(prepare("tiny"), model)
    config = run(tmp_path, f"model.name={model}", rows=chats(2), chat_template=None)
    templates = [TEMPLATE, TEMPLATE + " "]
    found = []
    for template in templates:
        (model / "chat_template.jinja").write_text(template)
        found.append(examined(config).task.contents)
    assert found[0]["model.chat_template"] != found[1]["model.chat_template"]
    assert found[0]["task.options.path"] == found[1]["task.options.path"]


def test_a_process_of_the_run_does_not_take_data_that_have_changed_meanwhile(begun, tmp_path):
    task = begun.task
    message = MakeTask(name=task.name, options=task.options, seed=begun.seed, contents=task.contents, limit_s=1.0)
    service_of(message)
    lines(tmp_path / "data.jsonl", sums(2))
    with pytest.raises(ConfigError, match=r"task\.options\.path holds other data \(.* bytes, .*\) than when the run"):
        service_of(message)
    scoring = task.options | {"path": str(tmp_path / "gone.jsonl")}
    # A task that only scores opens no data.
    service_of(MakeTask(name=task.name, options=scoring, seed=0, contents=task.contents, scores_only=True, limit_s=1.0))


def test_the_copyable_configuration_is_one_that_a_folder_of_ones_own_can_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(shipped("configs") / "dataset.yaml", tmp_path)
    lines(tmp_path / "problems.jsonl", chats(40))
    config = compose("dataset", ["model.name=tiny", f"+task.options.chat_template={template(tmp_path)}"], tmp_path)
    found = examined(config)
    assert set(found.task.contents) == {"task.options.path", "task.options.chat_template", "model.chat_template"}
    assert (len(make(found.task, 0)), make(found.task, 0).held_out_size()) == (38, 2)


def test_what_the_launcher_determines_is_not_for_the_user_to_set():
    with pytest.raises(ConfigError, match=r"task\.contents=.* is not allowed: the launcher determines it"):
        compose("tiny", ["+task.contents={a: b}"])
