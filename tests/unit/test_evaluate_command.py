"""`inflight eval`: which checkpoint and which settings are meant, and bad input in one line."""

import asyncio
import contextlib
import io
import json
import shutil
import sys
import threading
from dataclasses import replace

import pytest
from fake_generator import eventually
from in_process import in_process
from openai_server import Server, Tokens, choice
from rollout_samples import make_config

from inflight import cli
from inflight.config import ConfigError, RewardConfig, TaskConfig, run_of, save
from inflight.launcher import evaluate as command
from inflight.launcher.evaluate import EvaluationError, alone, find, newest, overridden, table
from inflight.starters.base import Command
from inflight.tasks.addition import Addition


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save(make_config(folder))
    return folder


def checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_of_a_run_the_best_checkpoint_is_meant_or_the_last(run_dir):
    with pytest.raises(ConfigError, match="has no checkpoint"):
        find(run_dir, None)
    checkpoint(run_dir / "checkpoints" / "step-000003")
    last = checkpoint(run_dir / "checkpoints" / "step-000006")
    assert find(run_dir, None) == (run_dir, last)
    assert newest(run_dir, last) == {}
    best = checkpoint(run_dir / "best" / "step-000003")
    assert find(run_dir, None) == (run_dir, best)
    assert newest(run_dir, best) == {"newest": str(last)}, "which an export of the run takes"
    assert newest(best, best) == {}, "a checkpoint that is named is meant"


def test_a_checkpoint_belongs_to_its_run_or_to_one_that_is_named(run_dir, tmp_path):
    inside = checkpoint(run_dir / "checkpoints" / "step-000003")
    assert find(inside, None) == (run_dir, inside)
    outside = checkpoint(tmp_path / "elsewhere" / "exported")
    assert find(outside, run_dir) == (run_dir, outside)
    with pytest.raises(ConfigError, match="belongs to no run: name one"):
        find(outside, None)
    with pytest.raises(ConfigError, match="neither a run folder"):
        find(tmp_path / "nothing", None)


def test_the_run_of_a_checkpoint_is_found_through_links(run_dir, tmp_path, monkeypatch):
    """Of the checkpoint, of the folder that holds it, of the run; and from inside."""
    one = checkpoint(run_dir / "checkpoints" / "step-000003")
    checkpoint(run_dir / "checkpoints" / "step-000006")
    (tmp_path / "last").symlink_to(one)
    assert run_of(tmp_path / "last") == run_dir
    (run_dir / "checkpoints").rename(tmp_path / "large")
    (run_dir / "checkpoints").symlink_to(tmp_path / "large")
    assert run_of(one) == run_dir
    monkeypatch.chdir(run_dir / "checkpoints" / "step-000003")
    assert run_of(run_dir / "checkpoints/step-000003/../step-000006") == run_dir
    (tmp_path / "named").symlink_to(run_dir)
    assert run_of(tmp_path / "named" / "checkpoints" / "step-000003") == tmp_path / "named"
    assert run_of(tmp_path / "large" / "step-000003") is None


def test_one_generator_serves_the_checkpoint_under_its_step(run_dir, tmp_path):
    config = overridden(make_config(run_dir), ["eval.sampling.samples=4", "eval.sampling.temperature=0.5"])
    assert (config.eval.sampling.samples, config.eval.sampling.temperature) == (4, 0.5)
    place = checkpoint(run_dir / "best" / "step-000012")
    found = alone(config, place, str(tmp_path / "alone"))
    assert (found.start_version, found.start_model, found.model.name) == (12, str(place), str(place))
    assert (found.generator.count, found.publish.transport, found.run_dir) == (1, "gloo", str(tmp_path / "alone"))
    assert found.model.served_name == config.model.name
    other = alone(config, checkpoint(tmp_path / "exported"), str(tmp_path / "alone"))
    assert (other.start_version, other.start_model) == (0, str(tmp_path / "exported"))


def test_a_checkpoint_of_adapters_is_refused(run_dir, tmp_path):
    config = overridden(make_config(run_dir), ["trainer.lora.rank=4"])
    with pytest.raises(ConfigError, match=r"a checkpoint of adapters \(trainer.lora\) can't be evaluated alone"):
        alone(config, checkpoint(run_dir / "best" / "step-000012"), str(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eval.sample=4"], "Key 'sample' not in 'EvalConfig'"),
        (["eval.timeout_s=-1"], "eval.timeout_s=-1.0 is not allowed"),
        (["eval.pass_k=["], "'eval.pass_k=[' can't be set: while parsing a flow node"),
        (["eval.pass_k=x"], "'eval.pass_k=x' can't be set: Invalid value assigned"),
        (["samples"], "samples is not allowed: KEY=VALUE"),
    ],
)
def test_values_that_can_not_be_set_are_refused_in_one_line(run_dir, capsys, overrides, says):
    checkpoint(run_dir / "checkpoints" / "step-000003")
    assert cli.main(["eval", str(run_dir), *overrides]) == 2
    said = capsys.readouterr().err
    assert said.startswith("inflight eval: ")
    assert says in said
    assert said.count("\n") == 1


def test_a_run_whose_task_holds_nothing_out_is_refused(run_dir, capsys):
    checkpoint(run_dir / "checkpoints" / "step-000003")
    assert cli.main(["eval", str(run_dir)]) == 2
    says = "task.name=addition holds no question out (docs/evaluation.md)"
    assert capsys.readouterr().err == f"inflight eval: {says}\n"


def test_more_questions_than_are_held_out_are_refused(tmp_path, capsys):
    """Of data, too, which are opened for that."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    options = {"path": str(tmp_path / "data.jsonl"), "prompt": "prompt", "held_out": 0.5}
    rewards = [RewardConfig("exact_match")]
    save(replace(make_config(tmp_path), task=TaskConfig("dataset", options), rewards=rewards))
    checkpoint(tmp_path / "checkpoints" / "step-000003")
    assert cli.main(["eval", str(tmp_path), "eval.questions=3"]) == 2
    says = (
        "eval.questions=3 is not allowed: 1 to 2, which is how many questions task.name=dataset holds out, or 0 for all"
    )
    assert capsys.readouterr().err.splitlines()[-1] == f"inflight eval: {says}"


def test_the_table_has_a_line_for_each_figure():
    result = {"checkpoint": "x", "version": 3, "eval/reward": 0.123456, "eval/failed_by": {"mixed versions": 2}}
    assert table(result).splitlines() == [
        "checkpoint  x",
        "version     3",
        "reward      0.1235",
        "failed_by   mixed versions: 2",
    ]
    assert json.loads(json.dumps(result)) == result


# --- what is shown before the figures are there ---


@pytest.fixture
def said(monkeypatch):
    """In place of stderr; a phase is mentioned at once, however short it is."""
    monkeypatch.setattr("inflight.view.stage.QUIET_S", 0.02)
    monkeypatch.setattr("inflight.view.stage.EVERY_S", 0.02)
    return io.StringIO()


def test_the_wait_for_the_generator_is_not_silent(tmp_path, tiny_model, monkeypatch, said):
    """The generator ends only when its start was mentioned."""
    config = alone(make_config(tmp_path), shutil.copytree(tiny_model, tmp_path / "step-000007"), str(tmp_path / "run"))
    end = tmp_path / "end"
    waits = f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)\nprint('no memory')"
    argv = [sys.executable, "-S", "-c", waits]
    start = Command(name="g0", kind="generator", argv=argv, log=config.logs / "g0.log", environment={})
    monkeypatch.setattr(command, "_generator", lambda _: start)

    def watch():
        try:
            eventually(lambda: "starting the generator … " in said.getvalue(), "the line on the generator")
        finally:
            end.touch()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    with contextlib.redirect_stderr(said), pytest.raises(EvaluationError, match="no memory"):
        command.evaluate(config)
    watching.join()
    assert "starting the generator … " in said.getvalue()


def test_the_wait_for_the_answers_says_how_many_there_are(tmp_path, monkeypatch, capsys, said):
    """Of three questions, with what has come when one is answered and when one waits for its score."""
    config = overridden(make_config(tmp_path), ["eval.concurrency=1"])

    async def until(line):
        await asyncio.to_thread(eventually, lambda: f"{line} … " in said.getvalue(), line)

    class Task(Addition):
        async def score(self, item, completion):
            await until(
                f"answering the questions: {len(server.requests)} answers received, "
                f"{len(server.requests) - 1} of 3 scored"
            )
            return await super().score(item, completion)

    @contextlib.asynccontextmanager
    async def foreign(_):
        await until("starting the processes of the task and its rewards")
        yield in_process(Task(seed=0, held_out=3), Tokens())

    async def scene():
        async with server:
            return await command._ask(config, server.url, 4)

    server = Server(lambda: choice("07", 4))
    monkeypatch.setattr(command, "foreign", foreign)
    with contextlib.redirect_stderr(said):
        result = asyncio.run(scene())
    assert (result["eval/answers"], result["eval/failed_by"]) == (3, {})
    assert not capsys.readouterr().out
