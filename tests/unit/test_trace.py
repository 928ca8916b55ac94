"""The trace of a run: spans of all processes at the right moments, without overlap in a line."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import msgspec
import pytest
from report_samples import make_one, make_run

from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, JsonLines
from inflight.report import trace
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer

STEP = {"time": 1010.0, "step": 4, "wait_s": 1.0, "train_s": 2.0, "publish_wait_s": 0.25, "pack_s": 0.05, "loss": 0.5}


@pytest.fixture
def run(tmp_path):
    folder = make_run(tmp_path / "run", groups=6, steps=3)
    with JsonLines(folder / METRICS_FILE) as metrics:
        metrics.write(STEP)
    with JsonLines(folder / EVAL_FILE) as evaluations:
        evaluations.write({"step": 4, "version": 4, "time": 1012.0, "eval/seconds": 1.5, "eval/reward": 0.5})
    with Writer(folder / ROLLOUTS_FILE) as writer:
        made = make_one(20, 2, 12)
        named = [msgspec.structs.replace(each, actor=f"a{at}") for at, each in enumerate(made.rollouts)]
        writer.append(msgspec.structs.replace(made, rollouts=named))
    return folder


def events(folder, *arguments: str) -> dict[tuple[str, str], list[dict]]:
    """(process, line) → its spans, of the file that the command writes."""
    assert trace.main([str(folder), *arguments]) == 0
    written = json.loads((folder / "trace.json").read_text())["traceEvents"]
    processes = {each["pid"]: each["args"]["name"] for each in written if each["name"] == "process_name"}
    lines = {each["tid"]: each["args"]["name"] for each in written if each["name"] == "thread_name"}
    found = defaultdict(list)
    for each in written:
        if each["ph"] == "X":
            found[processes[each["pid"]], lines[each["tid"]]].append(each)
    return found


def placed(spans: list[dict]) -> dict[str, tuple[float, float]]:
    """Name → start and duration in seconds, to 10 µs."""
    return {each["name"]: (round(each["ts"] / 1e6, 5), round(each["dur"] / 1e6, 5)) for each in spans}


def test_every_kind_is_where_it_happened(run, capsys):
    found = events(run)
    steps = {"wait for step 4": (1006.7, 1.0), "train 4": (1007.7, 2.0), "publish 4": (1009.7, 0.3)}
    assert placed(found["trainer", "steps"]) == steps
    assert found["trainer", "steps"][1]["args"]["loss"] == 0.5
    weights = {
        name: each
        for line in found
        if line[0] == "g0" and line[1].startswith("weights")
        for name, each in placed(found[line]).items()
    }
    assert weights["transfer 2"] == (1001.79, 0.2)
    assert weights["commit 2"] == (1001.99, 0.01)
    assert "version 6 failed" in weights
    assert placed(found["g0", "swaps"])["swap to 3"] == (1002.997, 0.003)
    lines = [line for line in found if line[1].startswith("sequences")]
    sequences = {name: each for line in lines for name, each in placed(found[line]).items()}
    assert len(sequences) == 14
    assert sequences["q20/0"] == (1004.0, 2.0)
    rewards = {name: each for line in found if line[0] == "actors" for name, each in placed(found[line]).items()}
    assert len(rewards) == 12, "of a file that does not say which actor it was"
    assert placed(found["a0", "rewards"]) == {"score q20/0": (1006.0, 0.25)}
    assert placed(found["a1", "rewards"]) == {"score q20/1": (1006.1, 0.25)}
    assert placed(found["evaluator", "evaluations"]) == {"evaluate 4": (1010.5, 1.5)}
    assert "3 steps are left out: their time was not recorded" in capsys.readouterr().err


def test_no_line_has_two_spans_at_once_and_none_more_than_needed(run):
    found = events(run)
    for spans in found.values():
        ordered = sorted(spans, key=lambda each: each["ts"])
        for one, other in itertools.pairwise(ordered):
            assert one["ts"] + one["dur"] <= other["ts"] + 1, (one, other)
    assert len([line for line in found if line[1].startswith("sequences")]) == 12, "so many ran at once"


def test_a_long_run_is_cut_to_its_end_and_says_so(run, capsys):
    found = events(run, "--sequences", "2")
    names = [each["name"] for line, spans in found.items() if line[1].startswith("sequences") for each in spans]
    assert sorted(names) == ["q20/0", "q20/1"]
    assert "the last 2 of 14 sequences are shown" in capsys.readouterr().err


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_it_is_what_the_trace_event_format_documents(run):
    """The fields of complete and metadata events as Chrome's "Trace Event Format" has them, which Perfetto reads: in
    plain JSON, integers of microseconds, and numbers of threads that no two processes share."""
    with JsonLines(run / METRICS_FILE) as metrics:
        metrics.write({**STEP, "step": 5, "loss": float("nan")})
    with (run / METRICS_FILE).open("a") as file:
        file.write(json.dumps({**STEP, "step": 6, "reward": float("inf")}) + "\n")
    events(run)
    trace = json.loads((run / "trace.json").read_text(), parse_constant=refused)
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    process_of, named = {}, {}
    for each in trace["traceEvents"]:
        assert isinstance(each["name"], str)
        assert isinstance(each["pid"], int)
        assert isinstance(each["args"], dict)
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "thread_name")
            assert isinstance(each["args"]["name"], str)
            named[each["pid"] if each["name"] == "process_name" else ("thread", each["tid"])] = each["args"]["name"]
            continue
        assert each.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert each["ph"] == "X"
        assert all(isinstance(each[name], int) for name in ("tid", "ts", "dur"))
        assert 0 < each["dur"] <= each["ts"] < 1 << 53
        assert process_of.setdefault(each["tid"], each["pid"]) == each["pid"]
        assert each["pid"] in named
        assert ("thread", each["tid"]) in named


def test_it_holds_no_text(run):
    """Neither prompts nor answers are in the file: it may be shown to others."""
    events(run)
    text = (run / "trace.json").read_text()
    assert "hurt" not in text
    assert "s3cret" not in text


def test_a_crashed_run_has_a_trace_of_what_was_written(run, capsys):
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"step": 5, "ti')
    path = run / ROLLOUTS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    found = events(run)
    assert found["trainer", "steps"]
    assert sum(len(spans) for line, spans in found.items() if line[1].startswith("sequences")) == 12


@pytest.mark.parametrize("arguments", [["--sequences", "0"], ["--out", "/proc/none/trace.json"]])
def test_what_cannot_be_a_trace_is_one_line(run, arguments, capsys):
    assert trace.main([str(run), *arguments]) == 2
    assert capsys.readouterr().err.count("\n") <= 2


def test_a_run_that_has_recorded_nothing(tmp_path, capsys):
    assert trace.main([str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert trace.main([str(tmp_path)]) == 2
    assert "has recorded nothing yet" in capsys.readouterr().err
    (tmp_path / SWAPS_FILE).write_text("no json\n")
    assert trace.main([str(tmp_path)]) == 2
    assert "line 1 is damaged" in capsys.readouterr().err
