"""A run's tokens by lag and by version, from the lines of its steps."""

from __future__ import annotations

import math
import signal
import subprocess
import sys

import msgspec
import pytest
import torch
from batches import make_batch

from inflight.cli import main
from inflight.metrics import METRICS_FILE, JsonLines, read_lines
from inflight.report.html.data import of_run
from inflight.report.staleness import by_lag, by_version, table
from inflight.trainer.logprobs import Scores
from inflight.trainer.loss import Loss
from inflight.trainer.objectives.ppo import ppo


def step(version, tokens, gated=()):
    """A step's line: tokens as (lag, log-ratio), and lags of tokens that were gated."""
    lags = [-1, *(lag for lag, _ in tokens), *gated]
    now = torch.tensor([[0.0, *(ratio for _, ratio in tokens), *(9.0 for _ in gated)]]) - 1
    mask = torch.tensor([[False, *(True for _ in tokens), *(False for _ in gated)]])
    batch = make_batch(torch.full_like(now, -1.0), [1.0], lags=[lags], trained=mask)
    batch.completion_mask[:, 1:] = True
    _, stats = Loss(ppo, "token")(Scores(now, torch.full_like(now, 0.25)), batch)
    return {"version": version, **stats.values()}


LINES = [step(4, [(0, 0.1), (0, -0.1), (2, 1.0)], gated=[5]), step(5, [(0, 0.3), (3, -0.5)], gated=[3, 5])]
"""Trained at versions 3 and 4."""


def test_rows_are_those_of_all_tokens_of_the_run():
    rows = {row.key: row for row in by_lag(LINES)}
    assert list(rows) == [0, 2, 3, 5]
    fresh = [0.1, -0.1, 0.3]
    mean = sum(fresh) / 3
    assert rows[0].tokens == 3
    assert rows[0].log_ratio_mean == pytest.approx(mean, abs=1e-6)
    assert rows[0].log_ratio_std == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in fresh) / 3), abs=1e-6)
    weights = [math.exp(x) for x in fresh]
    assert rows[0].ess == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)), abs=1e-6)
    assert rows[0].kl == pytest.approx(sum(math.exp(x) - 1 - x for x in fresh) / 3, abs=1e-6)
    assert rows[0].clip_share == pytest.approx(1 / 3)
    assert rows[0].entropy == pytest.approx(0.25)
    assert (rows[2].tail_share, rows[2].log_ratio_max) == (1.0, pytest.approx(1.0))
    assert (rows[3].tokens, rows[3].gated_share) == (1, 0.5)
    assert (rows[5].tokens, rows[5].gated_share, rows[5].ess) == (0, 1.0, 0.0)


def test_a_version_is_the_trainers_less_the_lag():
    rows = {row.key: row.tokens for row in by_version(LINES)}
    assert rows == {-2: 0, -1: 0, 1: 2, 3: 2, 4: 1}


def test_the_table_has_a_line_a_row():
    lines = table(by_lag(LINES), "lag").splitlines()
    assert [line.split()[0] for line in lines] == ["lag", "0", "2", "3", "5"]
    assert len({len(line) for line in lines}) == 1
    assert table([], "lag") == ""


def test_a_step_without_a_finite_figure_is_counted_and_spoils_no_mean(tmp_path):
    """One token was impossible under the new weights: minus infinity, which a line of metrics tells as null."""
    with JsonLines(tmp_path / METRICS_FILE) as file:
        for line in (*LINES, step(6, [(0, -math.inf), (0, 0.2), (7, 0.1)])):
            file.write(line)
    rows = {row.key: row for row in by_lag(read_lines(tmp_path / METRICS_FILE))}
    sound = {row.key: row for row in by_lag(LINES)}
    assert rows[0] == msgspec.structs.replace(sound[0], not_finite=2)
    assert {key: rows[key] for key in (2, 3, 5)} == {key: sound[key] for key in (2, 3, 5)}
    assert rows[7].tokens == 1
    head, *lines = table(list(rows.values()), "lag").splitlines()
    assert head.endswith("not finite")
    assert [line.split()[-1] for line in lines] == ["2", "0", "0", "0", "0"]
    assert "not finite" not in table(by_lag(LINES), "lag")


COMMON = {
    "reward": 0.5,
    "time_s": 1.0,
    "wait_s": 0.1,
    "train_s": 0.1,
    "publish_wait_s": 0.0,
    "pack_s": 0.0,
    "tokens_trained": 3,
    "tokens_masked": 1,
}


def test_the_report_of_a_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} has no metrics.jsonl" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"inflight report: there is no folder {tmp_path}/none\n"
    with JsonLines(tmp_path / METRICS_FILE) as file:
        for number, line in enumerate(LINES, start=1):
            file.write({"step": number, **COMMON, **line})
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert table(by_lag(LINES), "lag") in printed
    assert table(by_version(LINES), "version") in printed
    overview = [label for label, _ in of_run(tmp_path)["summary"]]
    assert overview[-1] == "lag of tokens", "the page has a table of its own for the figures by lag"


@pytest.mark.parametrize("steps", [1, 400])  # within Python's buffer of the output, and beyond it
def test_a_reader_that_has_what_it_wants_is_no_fault(tmp_path, steps):
    with JsonLines(tmp_path / METRICS_FILE) as file:
        for number in range(1, steps + 1):
            file.write({"step": number, **COMMON, **LINES[0], "version": number})
    program = [sys.executable, "-m", "inflight.cli", "report", str(tmp_path)]
    report = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    report.stdout.close()
    assert report.stderr.read() == ""
    assert report.wait(60) == 128 + signal.SIGPIPE


WITHOUT_VERSION = {name: value for name, value in LINES[0].items() if name != "version"}


@pytest.mark.parametrize(
    "line, words",
    [
        (WITHOUT_VERSION, "KeyError: 'version'"),
        (LINES[0] | {"version": None}, "TypeError"),
        (LINES[0] | {"by_lag": {"x": {}}}, "'x'"),
        (COMMON | LINES[0] | {"groups_failed": "two"}, 'ValueError: groups_failed is "two", not an object'),
        (COMMON | LINES[0] | {"groups_dropped": {"too old": "two"}}, "groups_dropped is "),
        (COMMON | LINES[0] | {"rollouts_dropped": [["too old", 2]]}, "rollouts_dropped is "),
        (COMMON | LINES[0] | {"lag_counts": [4]}, "lag_counts is [4], not an object of whole numbers"),
    ],
)
def test_the_report_of_a_damaged_line_is_one_line(tmp_path, capsys, line, words):
    with JsonLines(tmp_path / METRICS_FILE) as file:
        file.write(line)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "metrics.jsonl, swaps.jsonl or eval.jsonl is damaged: " in said.err
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
