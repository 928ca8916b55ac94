"""`inflight show`, and the rollout file as other tools read it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rollout_samples import make_config, make_group, make_rollout
from tokenizers import Tokenizer, decoders, models

from inflight import config as configuration
from inflight.arrays import Floats, Sets
from inflight.cli import main
from inflight.metrics import METRICS_FILE, JsonLines
from inflight.report import show_text, summary
from inflight.report.answers import Training, asked
from inflight.report.selection import range_of
from inflight.report.token_text import TokenTexts
from inflight.report.visible import visible
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.types import GeneratorSpan, Rollout, RolloutGroup, RoutedExperts, StepReward, Turn

ROOT = Path(__file__).parents[2]
PIECES = ["a", "b", "\x1b[2J", "\x9b31m", "\u202e", "⟦v9⟧", "\n", "c", "d", "e"]


@pytest.fixture
def hostile_model(tmp_path) -> Path:
    """A model whose tokenizer's pieces are PIECES."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def run(tmp_path, hostile_model) -> Path:
    """Four groups: one trained on at version 3, one dropped, its second attempt trained on at 4, one still waiting."""
    folder = tmp_path / "run"
    config = make_config(folder)
    model = configuration.ModelConfig(name=str(hostile_model))
    configuration.save(configuration.RunConfig(model=model, task=config.task, run_dir=str(folder)))
    groups = [
        RolloutGroup(
            group_id="q0",
            prompt_key="k",
            rollouts=[
                make_rollout("q0", 0, spans=[(0, 1), (4, 2)], length=6, reward=1.0),
                make_rollout("q0", 1, spans=[(0, 3)], length=2, reward=0.0),
            ],
        ),
        make_group("q1", spans=[(0, 0)], reward=0.25),
        make_group("q1.1", spans=[(0, 4)], reward=0.75),
        make_group("q2", spans=[(0, 4)], reward=-1.0),
    ]
    with Writer(folder / ROLLOUTS_FILE) as writer:
        for group in groups:
            writer.append(group)
    with JsonLines(folder / METRICS_FILE) as metrics:
        metrics.write({"step": 4, "version": 4, "questions": [0], "dropped": {"q1": "too old"}, "left_out": ["q0/1"]})
        metrics.write({"step": 5, "version": 5, "questions": [1], "dropped": {}, "left_out": []})
    return folder


def shown(capsys, *arguments) -> dict[str, dict]:
    """Group → what `--json` says of it."""
    code = main(["show", *map(str, arguments), "--limit", "0", "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == (0 if records else 1)
    return {record["group_id"]: record for record in records}


def test_each_token_has_its_text_version_lag_and_logprob(run, capsys):
    record = shown(capsys, run)["q0"]
    first, second = record["rollouts"]
    assert first["tokens"] == {
        "id": [0, 1, 2, 3, 4, 5],
        "text": PIECES[:6],
        "version": [1, 1, 1, 1, 2, 2],
        "lag": [2, 2, 2, 2, 1, 1],
        "logprob": [-0.5] * 6,
    }
    assert (first["reward"], first["left_out"], second["left_out"]) == (1.0, False, True)
    assert record["prompt"] == "cde"
    assert record["trained_at"] == 3


def test_what_became_of_each_group(run, capsys):
    fates = {name: record["fate"] for name, record in shown(capsys, run).items()}
    assert fates == {
        "q0": "trained on in step 4, at version 3",
        "q1": "dropped by the gate: too old",
        "q1.1": "trained on in step 5, at version 4",
        "q2": "not trained on: in the trainer's buffer, or in a step that was not finished",
    }
    assert main(["show", str(run), "q0"]) == 0
    assert len(re.findall(r"q0/1 .*left out by the gate", capsys.readouterr().out)) == 1


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["q1"], {"q1": 2, "q1.1": 2}),
        (["q1.1"], {"q1.1": 2}),
        (["q0/1"], {"q0": 1}),
        (["--reward", "0.5:"], {"q0": 1, "q1.1": 2}),
        (["--reward=-1:0"], {"q0": 1, "q2": 2}),
        (["--version", "2"], {"q0": 1}),
        (["--version", "2:3"], {"q0": 2}),
        (["--lag", ":0"], {"q0": 1, "q1.1": 2}),
        (["--lag", "2"], {"q0": 1}),
        (["--lag", "0", "--reward", "0.75"], {"q1.1": 2}),
        (["q7"], {}),
        (["--dropped"], {"q0": 1, "q1": 2, "q2": 2}),
        (["--dropped", "--reward", "0.25"], {"q1": 2}),
    ],
)
def test_filters(run, capsys, arguments, found):
    assert {name: len(record["rollouts"]) for name, record in shown(capsys, run, *arguments).items()} == found


def test_a_name_that_does_not_exist_is_in_the_error(run, capsys):
    assert main(["show", str(run), "7"]) == 1
    error = capsys.readouterr().err
    assert "has no such rollout by the name 7 (such as q5, q5.1 or q5/0)" in error
    assert "failed" not in error


def test_a_group_that_failed_is_not_there_and_that_is_said(run, capsys):
    with JsonLines(run / METRICS_FILE) as metrics:
        metrics.write({"step": 99, "groups_failed": {"reward short error: ValueError": 2, "prompt too long": 1}})
    assert main(["show", str(run), "q5000"]) == 1
    assert (
        "groups that failed are not recorded (prompt too long: 1, reward short error: ValueError: 2): "
        "the actors' logs name the first of each reason"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, 1])
def test_of_a_run_whose_groups_all_failed_the_reasons_are_shown(run, capsys, steps):
    """Nobody has named a rollout that could be missing. Before the first step the launcher's summary has the counts."""
    failed = {"prompt too long": 3}
    (run / ROLLOUTS_FILE).unlink()
    with Writer(run / ROLLOUTS_FILE):
        pass
    (run / METRICS_FILE).unlink()
    if steps:
        with JsonLines(run / METRICS_FILE) as metrics:
            metrics.write({"step": 1, "groups_failed": failed})
    else:
        summary.write(run, summary.summarize(run, {"groups_failed": failed}))
    assert main(["show", str(run)]) == 1
    assert capsys.readouterr().err == (
        f"inflight show: {run} has no rollout: no group has arrived; groups that failed are not recorded "
        "(prompt too long: 3): the actors' logs name the first of each reason\n"
    )


def test_the_newest_and_a_limit(run, capsys):
    assert main(["show", str(run), "--last", "--limit", "1"]) == 0
    assert re.findall(r"^q\S+", capsys.readouterr().out, re.MULTILINE) == ["q2"]
    assert main(["show", str(run), "--limit", "2"]) == 0
    output = capsys.readouterr()
    assert re.findall(r"^q\S+", output.out, re.MULTILINE) == ["q0", "q1"]
    assert "there are more groups" in output.err


def test_a_mark_stands_before_the_tokens_of_each_version_and_each_has_its_colour(run):
    group = make_group("q0", spans=[(0, 1), (2, 2)], length=4, size=1)
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="truecolor", highlight=False)
    show_text.show(console, asked(group, Training([]), lambda ids: [f"<{each}>" for each in ids]))
    coloured = re.findall(r"\x1b\[38;2;([\d;]+)m([^\x1b]*)\x1b", output.getvalue().replace("\x1b[1;38", "\x1b[38"))
    assert [text for _, text in coloured] == ["⟦v1⟧", "<0><1>", "⟦v2⟧", "<2><3>"]
    colours = [colour for colour, _ in coloured]
    assert colours[0] == colours[1] != colours[2] == colours[3]


@pytest.mark.parametrize("arguments", [["q0"], ["q0", "--json"]])
def test_no_text_of_a_model_controls_the_terminal(run, capsys, arguments):
    assert main(["show", str(run), *arguments]) == 0
    output = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", output)
    assert output.count("⟦v9⟧") == 0, "what a model writes can't be taken for a mark"
    if "--json" not in arguments:
        assert "⟦v1⟧ab␛[2J\\u009b31m⟦v2⟧\\u202e\\u27e6v9\\u27e7" in output


def test_names_and_reasons_control_it_neither(tmp_path, run, capsys):
    with Writer(run / ROLLOUTS_FILE) as writer:
        writer.append(make_group("q9\x1b[2J", finish_reason="stop\x1b]0;x\x07"))
    assert main(["show", str(run), "q9\x1b[2J"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_line_break_is_shown_and_made(run, capsys):
    with Writer(run / ROLLOUTS_FILE) as writer:
        writer.append(make_group("q3", length=8, size=1, token_ids=[0, 6, 7, 7, 7, 7, 7, 7]))
    assert main(["show", str(run), "q3"]) == 0
    assert "    ⟦v0⟧a␊\n    cccccc\n" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["x", "1:2:3", ":", "", "5:2", "nan"])
def test_a_range_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="is no range"):
        range_of(text)


def test_a_run_that_is_being_written_is_shown_up_to_its_last_whole_record(run, capsys):
    path = run / ROLLOUTS_FILE
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["show", str(run), "--limit", "0"]) == 0
    output = capsys.readouterr()
    assert re.findall(r"^q\S+", output.out, re.MULTILINE) == ["q0", "q1", "q1.1"]
    assert "the file is still written, or its writer was killed" in output.err


def test_damage_before_the_end_is_one_line_and_code_2(run, capsys):
    path = run / ROLLOUTS_FILE
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert main(["show", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is damaged" in error


@pytest.mark.parametrize(
    "line, says",
    [
        ({"groups_failed": 5}, "ValueError: groups_failed is 5, not an object of whole numbers"),
        ({"groups_failed": {"prompt too long": "two"}}, 'groups_failed is {"prompt too long": "two"}, not an object'),
        ({"dropped": 5}, "TypeError"),
        ({"questions": [7]}, "KeyError: 'version'"),
    ],
)
def test_a_damaged_figure_is_one_line_and_code_2(run, capsys, line, says):
    with JsonLines(run / METRICS_FILE) as metrics:
        metrics.write({"step": 6} | line)
    assert main(["show", str(run), "q5000"]) == 2
    said = capsys.readouterr()
    assert "metrics.jsonl, swaps.jsonl or eval.jsonl is damaged: " in said.err
    assert says in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_damaged_counts_of_failed_groups_do_not_hide_what_is_recorded(run, capsys):
    with JsonLines(run / METRICS_FILE) as metrics:
        metrics.write({"step": 6, "groups_failed": [1]})
    assert set(shown(capsys, run)) == {"q0", "q1", "q1.1", "q2"}


def test_ids_are_shown_where_there_is_no_tokenizer(run, hostile_model, capsys):
    (hostile_model / "tokenizer.json").unlink()
    assert main(["show", str(run), "q0/0"]) == 0
    output = capsys.readouterr()
    assert "⟦v1⟧0 1 2 3 ⟦v2⟧4 5" in output.out
    assert "token ids instead of text" in output.err


@pytest.mark.parametrize("folder", ["absent", "model"])
def test_no_run_is_one_line_and_code_2(tmp_path, hostile_model, folder, capsys):
    assert main(["show", str(tmp_path / folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_spans_that_do_not_fit_and_rewards_that_are_no_numbers(run, capsys):
    with Writer(run / ROLLOUTS_FILE) as writer:
        writer.append(make_group("q4", spans=[(3, 1)], size=1, reward=float("nan")))
    record = shown(capsys, run, "q4")["q4"]["rollouts"][0]
    assert (record["reward"], record["tokens"]["version"], record["tokens"]["lag"]) == (None, None, None)
    assert main(["show", str(run), "q4"]) == 0
    assert "⟦version unknown⟧" in capsys.readouterr().out


def test_texts_of_tokens_that_share_a_character(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "▁x": 3}, unk_token="▁x"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(tmp_path)
    assert texts.of([3, 0, 1, 2, 3, 99]) == [" x", "", "", "€", " x", ""]


def test_what_is_printable_stays_as_it_is():
    assert visible("Grüße, 日本 👍 <b>") == "Grüße, 日本 👍 <b>"


def documented_reader() -> dict:
    """What the code in docs/rollouts.md defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rollouts.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "docs/rollouts.md", "exec"), names)
    return names


def plain(value):
    """A record as the file has it: what is a default is left out, spans are lists, arrays are bytes."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=arrays_as_documented))


def arrays_as_documented(value):
    if isinstance(value, Sets):
        ids = [token for each in value for token in each]
        return [np.array([len(each) for each in value], "<u2").tobytes(), np.array(ids, "<i4").tobytes()]
    return np.array(list(value), "<f4" if isinstance(value, Floats) else "<i4").tobytes()


def test_it_is_ten_lines():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rollouts.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) == 10


def test_the_documented_lines_read_the_file_without_inflight(tmp_path):
    read = documented_reader()
    everything = msgspec.structs.replace(
        make_rollout(
            "q0",
            0,
            spans=[(0, 1), (2, 5)],
            length=4,
            kept=[[1, 2]] * 4,
            routed_experts=RoutedExperts(shape=(1, 1, 2), bytes_each=1, data=b"\x00\xff"),
        ),
        step_rewards=[StepReward(1, 0.5)],
        teacher_logprobs=[-0.25] * 4,
        retries={"aborted": 2},
        unscored="late",
        actor="a1",
        pieces=[GeneratorSpan(0, "g0"), GeneratorSpan(3, "g1")],
    )
    groups = [
        RolloutGroup(group_id="q0", prompt_key="é", rollouts=[everything]),
        make_group("q1", spans=[(0, 3)], size=3),
        make_group("q2", spans=[], length=0),
    ]
    with Writer(tmp_path / "r") as writer:
        for group in groups:
            writer.append(group)

    def found() -> list[dict]:
        with (tmp_path / "r").open("rb") as file:
            return list(read["groups"](file))

    first = found()
    assert first == plain(groups)
    with Writer(tmp_path / "parts", 1) as writer:
        for group in groups:
            writer.append(group)
    files = sorted(tmp_path.glob("parts*"))
    assert [group for file in files for group in read["groups"](file.open("rb"))] == first
    turn = first[0]["rollouts"][0]["turn"]
    assert np.frombuffer(turn["token_ids"], "<i4").tolist() == everything.turn.token_ids.tolist()
    assert np.frombuffer(turn["logprobs"], "<f4").tolist() == everything.turn.logprobs.tolist()
    turns = [rollout["turn"] for group in first for rollout in group["rollouts"]]
    assert [read["versions"](turn).tolist() for turn in turns] == [[1, 1, 5, 5], *[[3] * 6] * 3, [], []]
    whole = (tmp_path / "r").read_bytes()
    for damaged in (whole[:-1], whole[:-20] + b"\x00" + whole[-19:]):
        (tmp_path / "r").write_bytes(damaged)
        assert len(found()) == 2
    (tmp_path / "r").write_bytes(b"inflrol\x01")
    with pytest.raises(AssertionError):
        found()


def test_the_documentation_names_every_field_of_the_file():
    text = (ROOT / "docs" / "rollouts.md").read_text()
    for kind in (RolloutGroup, Rollout, Turn):
        missing = [field for field in kind.__struct_fields__ if f"`{field}`" not in text]
        assert not missing, f"{kind.__name__}: {missing}"
