"""Data that change, break or overlap: what is read is what is there now, and nothing is lost without being counted."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_dataset import dataset, lines, own_cache, sums  # noqa: F401 - own_cache is a fixture
from test_dataset_hub import dataset as of_hub
from test_dataset_hub import hub  # noqa: F401 - a fixture
from test_dataset_start import examined, run

from inflight.config import ConfigError
from inflight.tasks.course import Course, NoMoreQuestions
from inflight.tasks.data import stream
from inflight.tasks.data.form import BadPrompt
from inflight.tasks.data.rows import NotJson
from inflight.tasks.data.stream import Unreadable
from inflight.tasks.examine import examine


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_another_content_of_the_same_size_and_time_is_read(tmp_path, kind):
    """As after a copy that keeps times: the cache of `datasets` would take it for the old one."""
    file = tmp_path / f"a.{kind}"
    for answer in ("7", "8"):
        row = {"prompt": "3+4=", "answer": answer}
        if kind == "jsonl":
            lines(file, [row])
        else:
            pq.write_table(pa.Table.from_pylist([row]), file)
        os.utime(file, (1e9, 1e9))
        assert dataset(str(file), prompt="prompt").item(0).answer == answer


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_name_with_the_signs_of_a_pattern_is_a_name(tmp_path, kind, streaming):
    """The library drops such a file of several without a word."""
    folder = tmp_path / "run[1]"
    folder.mkdir()
    for number, part in enumerate((sums(4)[:3], sums(4)[3:])):
        if kind == "jsonl":
            lines(folder / f"x[{number}].jsonl", part)
        else:
            pq.write_table(pa.Table.from_pylist(part), folder / f"x[{number}].parquet")
    options = {"prompt": "prompt", "shuffle": False, "streaming": streaming}
    task = dataset(str(tmp_path / f"run*/x*.{kind}"), **options)
    assert [task.item(index).prompt for index in range(4)] == [row["prompt"] for row in sums(4)]
    assert dataset(str(folder / f"x[1].{kind}"), **options).item(0).prompt == "3+1="
    os.rename(folder / f"x[1].{kind}", folder / f"x::1.{kind}")
    with pytest.raises(ConfigError, match=f"x::1.{kind}' is not allowed: :: joins file systems"):
        dataset(str(tmp_path / f"run*/x*.{kind}"), **options).item(0)


# --- streams ---


def streamed(path):
    return dataset(str(path), prompt="prompt", streaming=True, shuffle=False)


def test_a_line_of_a_stream_that_is_not_utf8_costs_itself(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "1"}\n{"prompt": "\xff"}\n{"prompt": "\\\xe9"}\n\xff\n{"prompt": "5"}\n')
    task = streamed(file)
    for line in (2, 3, 4):
        with pytest.raises(NotJson, match=f"line {line}: it is not JSON"):
            task.item(line - 1)
    assert [task.item(index).prompt for index in (4, 0)] == ["5", "1"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", r"line 1: the line is empty \(each line holds one JSON object\)$"),
        ("{", r"line 1: it is not JSON: .* \(each line holds one JSON object\)$"),
        ("3", r"line 1: it is int, not a JSON object \(each line holds one JSON object\)$"),
    ],
)
def test_a_file_of_one_json_text_is_told_that_lines_are_read(tmp_path, line, says):
    (tmp_path / "a.json").write_text(f'{line}\n{{"prompt": "2"}}\n')
    with pytest.raises(NotJson, match=says):
        dataset(str(tmp_path / "a.json"), prompt="prompt", shuffle=False).item(0)


ARRAY = r"\(the file is an array, since it begins with \[: each line must hold one JSON object\)$"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ('\ufeff\n [\n  {"prompt": "1"},\n  {"prompt": "2"}\n]\n', 3, "it is not JSON: "),
        ('[{"prompt": "1"}]\n', 1, "it is list, not a JSON object "),
    ],
)
def test_a_file_that_is_one_array_is_told_so(tmp_path, text, line, why, streaming):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(NotJson, match=rf"a\.json, line {line}: {why}.*{ARRAY}"):
        dataset(str(tmp_path / "a.json"), prompt="prompt", shuffle=False, streaming=streaming).item(line - 1)


def test_a_stream_that_breaks_is_not_at_its_end(tmp_path, monkeypatch):
    file = lines(tmp_path / "a.jsonl", sums(6))
    begin, broken = stream.StreamRows._begin, [True] * 3  # once as the file is opened, for rows ahead

    def some(rows):
        for number, row in enumerate(rows):
            if number == 3 and broken:
                broken.pop()
                raise OSError("stale file handle")
            yield row

    monkeypatch.setattr(stream.StreamRows, "_begin", lambda rows: some(begin(rows)))
    course = Course(streamed(file), epochs=2)
    assert course.item(2).prompt == "2+1="
    for index in (3, 5):
        with pytest.raises(Unreadable, match=r"line 4 and what follows can't be read: OSError: stale file handle"):
            course.item(index)
    assert [course.item(index).prompt for index in (3, 5, 6)] == ["3+1=", "5+1=", "0+1="]
    with pytest.raises(NoMoreQuestions) as end:
        course.item(12)
    assert end.value.questions == 12


@pytest.mark.parametrize("then", [3, 0], ids=["goes on", "reads again"])
@pytest.mark.parametrize("rows", [sums(9)[3:], sums(2), sums(3)], ids=["longer", "shorter", "alike"])
def test_a_stream_whose_file_is_another_one_meanwhile_says_so(tmp_path, monkeypatch, then, rows):
    monkeypatch.setattr(stream, "KEPT", 1)
    monkeypatch.setattr(stream, "AHEAD", 0)
    file = tmp_path / "a.jsonl"
    task = streamed(lines(file, sums(3)))
    course = Course(task)
    assert course.item(2).prompt == "2+1="
    lines(file, rows)
    os.utime(file, (1e9, 1e9))
    for _ in range(2):
        with pytest.raises(Unreadable, match="the files have changed since the run began to read them"):
            course.item(then)


def test_the_files_of_a_stream_are_looked_at_for_many_rows_at_a_time(tmp_path, monkeypatch):
    """With thousands of them a look takes longer than a row. It is for every row, nevertheless: one that was read
    before a file has changed is of the file that was."""
    rows = sums(stream.AHEAD * 3)
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        lines(file, rows[number::3])
    look, looks = stream.StreamRows._require_unchanged, []
    monkeypatch.setattr(stream.StreamRows, "_require_unchanged", lambda rows: looks.append(1) or look(rows))
    task = streamed(tmp_path / "*.jsonl")
    prompts = [row["prompt"] for number in range(3) for row in rows[number::3]]
    assert [task.item(index).prompt for index in range(stream.AHEAD * 2)] == prompts[: stream.AHEAD * 2]
    assert len(looks) < 6
    lines(files[0], rows)  # that was read wholly
    assert task.item(stream.AHEAD * 2).prompt == prompts[stream.AHEAD * 2]
    with pytest.raises(Unreadable, match="the files have changed since the run began to read them"):
        task.item(stream.AHEAD * 2 + 2)


def test_rows_are_given_out_after_the_look_at_their_files(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    lines(file, sums(stream.AHEAD * 3))
    begin, row = stream.StreamRows._begin, stream.AHEAD * 2

    def changed(rows):
        for number, each in enumerate(rows):
            if number == row + 5:
                lines(file, sums(3))
            yield each

    monkeypatch.setattr(stream.StreamRows, "_begin", lambda rows: changed(begin(rows)))
    task = streamed(file)
    assert task.item(row - stream.AHEAD - 1).prompt
    with pytest.raises(
        Unreadable,
        match=f"line {row + 1} and what follows can't be read: the files have changed since the run began to read them",
    ):
        task.item(row)


def table(file, **columns):
    pq.write_table(pa.table(columns), file)


def test_a_stream_goes_past_a_table_without_rows(tmp_path):
    for name, values in (("a", ["1"]), ("b", []), ("c", ["2"])):
        table(tmp_path / f"{name}.parquet", prompt=pa.array(values, pa.string()))
    course = Course(streamed(tmp_path / "*.parquet"), epochs=2)
    assert [course.item(index).prompt for index in range(4)] == ["1", "2", "1", "2"]
    with pytest.raises(ConfigError, match=r"b\.parquet' is empty: it has no row$"):
        streamed(tmp_path / "b.parquet").item(0)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"prompt": [1], "level": [1]}, r"a\.parquet and .*b\.parquet, column 'prompt' is .*string.* and .*int64.*$"),
        ({"prompt": ["2"]}, r"a\.parquet and .*b\.parquet, column 'level' is in one of them alone$"),
    ],
)
def test_a_stream_of_tables_with_other_columns_is_refused_before_the_first_row(tmp_path, second, says):
    """Its library would make text of a number, or end there."""
    table(tmp_path / "a.parquet", prompt=["1"], level=[1])
    table(tmp_path / "b.parquet", **second)
    with pytest.raises(ConfigError, match=f"^task.options.path: the files do not have the same columns: .*{says}"):
        streamed(tmp_path / "*.parquet").item(0)


def test_a_column_without_a_value_in_one_table_goes_with_any_other(tmp_path):
    table(tmp_path / "a.parquet", prompt=["1"], level=[1])
    table(tmp_path / "b.parquet", prompt=["2"], level=pa.nulls(1))
    assert streamed(tmp_path / "*.parquet").item(1).columns == {"level": None}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path, streaming):
    columns = [pa.array(["1"]), pa.array(["2"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "prompt"]), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"a\.parquet' can't be read: ValueError: it has 2 columns of the name 'prompt'$"
    ):
        dataset(str(tmp_path / "a.parquet"), prompt="prompt", shuffle=False, streaming=streaming).item(0)


# --- what is held out ---


@pytest.mark.parametrize("how", ["the file", "in the pattern", "a link", "a copy"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_file_that_is_trained_on_is_not_held_out(tmp_path, how, streaming):
    own, other = lines(tmp_path / "a.jsonl", sums(4)), lines(tmp_path / "b.jsonl", sums(5))
    path, held = {
        "the file": (own, own),
        "in the pattern": (str(tmp_path / "*.jsonl"), other),
        "a link": (own, str(tmp_path / "c.jsonl")),
        "a copy": (own, str(tmp_path / "d.jsonl")),
    }[how]
    if how == "a link":
        (tmp_path / "c.jsonl").symlink_to(own)
    lines(tmp_path / "d.jsonl", sums(4))
    more = {"streaming": True, "shuffle": False} if streaming else {}
    with pytest.raises(ConfigError, match=r"held_out_path=.* is not allowed: .*\.jsonl would be trained on, too, as"):
        dataset(path, prompt="prompt", held_out_path=held, **more).held_out_size()


@pytest.mark.parametrize(
    ("split", "held", "shared"),
    [("train", "train[:40%]", 2), ("all", "test", 1), ("train[:3]+test", "test+train[2:]", 2), ("train", "train", 5)],
)
def test_rows_of_the_hub_that_are_trained_on_are_not_held_out(hub, split, held, shared):  # noqa: F811
    with pytest.raises(ConfigError, match=rf"is not allowed: {shared} of its rows are in split='.*', too"):
        of_hub(split=split, held_out_split=held).held_out_size()
    assert of_hub(split="train[:3]", held_out_split="train[3:]").held_out_size() == 2


# --- what the examination sees ---


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"prompt": [3, 17]}, {}, "NotATokenId: token id 17 is not one of the model's: 0 to 16"),
        ({"prompt": [-1, 3]}, {}, "NotATokenId: token id -1 is not one of the model's: 0 to 16"),
        ({"prompt": [3, 1 << 70]}, {}, "NotATokenId: token id 1180591620717411303424 is not"),
        (
            {"prompt": "1", "answer": 1 << 70},
            {},
            "NotCarried: column 'answer' can't be given to rewards: .* 64 bits",
        ),
        ({"prompt": ""}, {}, "the prompt has no tokens"),
    ],
)
def test_what_no_actor_could_ask_is_counted_before_the_start(tmp_path, row, options, says):
    row = {"answer": "1"} | row
    text = {"messages": None, "chat_template": None, "prompt": "prompt"} | options
    with pytest.raises(ConfigError, match=f"the first 8 questions can't be asked; the first: .*{says}"):
        examined(run(tmp_path, rows=[row] * 9, **text))
    config = run(tmp_path, rows=[row, {"prompt": [16, 0], "answer": "2"}], **text)
    task = dataset(**config.task.options)
    assert examine(config, task).left_out.startswith("of 2 questions, 1 will be left out: 1 that can't be asked (")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": 5, "content": "x"}, "has the role 5, and a role is text"),
        ({"role": None, "content": "x"}, "has the role None"),
        ({"role": "user"}, "a message of the role 'user' has no content"),
        ({"role": "user", "content": None}, "a message of the role 'user' has no content"),
        ({"role": "user", "content": 5}, "holds int, and a model is asked with text"),
        ({"role": "user", "content": []}, "holds an empty list, and"),
        ({"role": "user", "content": {"text": "x"}}, "holds dict, and a model is asked with text"),
        ({"role": "user", "content": ["x"]}, "holds str, and a model is asked with text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "holds 'image_url', and"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "holds 'text', and"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, ""),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "tool", "value": "x"}, ""),
        ({"role": "user", "content": ""}, ""),
    ],
)
def test_a_message_that_a_template_would_write_as_python_does_is_no_question(tmp_path, message, says):
    task = dataset(lines(tmp_path / "a.jsonl", [{"m": [{"role": "system", "content": "s"}, message]}]), messages="m")
    if not says:
        assert task.item(0).prompt.messages[1] == message
        return
    with pytest.raises(BadPrompt, match=f"line 1: column 'm': .*{says}"):
        task.item(0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"columns": "answer"}, r"columns='answer' is not allowed: it takes list\[str\] \| None"),
        ({"columns": [1]}, r"columns=\[1\] is not allowed"),
        ({"path": 5}, "path=5 is not allowed: it takes str"),
        ({"template": ["x"]}, r"template=\['x'\] is not allowed: it takes dict\[str, Any\]"),
        ({"held_out": True}, "held_out=True is not allowed: it takes float"),
    ],
)
def test_an_option_of_another_type_is_refused_by_its_name(tmp_path, options, says):
    with pytest.raises(ConfigError, match=rf"^task\.options\.{says}"):
        dataset(**{"path": lines(tmp_path / "a.jsonl", sums(3)), "prompt": "prompt"} | options)
