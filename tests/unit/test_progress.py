"""What a person sees of a run."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from inflight.launcher.compose import compose
from inflight.launcher.progress import Progress, View, sparkline

SHAPE = ["trainer.steps=8", "trainer.groups_per_step=2", "gate.max_lag=4"]


@pytest.fixture
def progress(tmp_path) -> Progress:
    return Progress(compose("tiny", [f"run_dir={tmp_path}/night", "generator.count=2", *SHAPE]))


def rendered(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(progress.render())
    return console.file.getvalue()


def test_sparkline_spans_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([9, 0, 1], width=2) == "▁█"


def test_before_any_news_everybody_is_starting(progress):
    assert "step 0/8 · starting · g0 starting · g1 starting" in progress.line()
    assert "starting" in rendered(progress)


def test_a_resumed_run_starts_from_its_step(tmp_path):
    config = compose("tiny", [f"run_dir={tmp_path}/night", *SHAPE])
    progress = Progress(dataclasses.replace(config, checkpoint="night/step-5"))
    assert "step 5/8 · starting" in progress.line()
    assert "step 5/8" in rendered(progress)
    progress.update("trainer", {"step": 6})
    assert "step 6/8" in progress.line()


def test_what_a_process_said_before_it_ended_is_shown_no_more(progress):
    for name in ("g0", "g1"):
        progress.update(name, {"version": 3, "running": 4})
    progress.forget("g0")
    progress.forget("a0")  # ended before it said anything
    assert "g0 starting · g1 version 3, 4 running" in progress.line()


def test_phases_show_until_numbers_come(progress):
    progress.update("g0", {"phase": "loading"})
    assert "g0 loading" in progress.line()
    progress.update("g0", {"version": 0, "running": 4})
    assert "g0 version 0, 4 running" in progress.line()


def test_all_known_values_show(progress):
    progress.update("trainer", {"step": 1, "reward": 0.25, "buffer": 3, "tokens_per_s": 412.7})
    progress.update("trainer", {"step": 2, "reward": 0.75, "lag_mean": 1.5, "lag_max": 3, "swaps": 2, "gap_ms": 0.3127})
    progress.update("g1", {"version": 2, "running": 5, "tokens_per_s": 99.5})
    progress.update("a0", {"in_flight": 4, "done": 9, "unknown": 1})
    for text in (rendered(progress), progress.line()):
        assert "reward 0.75 · lag 1.5 (max 3) · buffer 3/10 · 413 tokens/s · 2 swaps, last gap 0.313 ms" in text
        assert "version 2, 5 running, 99.5 tokens/s" in text
    assert "▁█ 0.75" in rendered(progress)
    assert "4 groups in flight, 9 done" in rendered(progress)


def test_the_reward_of_all_groups_is_shown_where_it_is_another_one(progress):
    progress.update("trainer", {"step": 1, "reward": 0.5, "reward_all": 0.5})
    assert "reward 0.5 · " in progress.line()
    progress.update("trainer", {"reward_all": 0.05})
    for text in (progress.line(), rendered(progress)):
        assert "reward 0.5 (all 0.05)" in text


def test_what_is_no_number_ends_no_view(progress):
    progress.update("trainer", {"step": 1, "reward": 0.5})
    progress.update("trainer", {"step": 2, "reward": float("nan")})
    progress.update("trainer", {"step": 3, "reward": float("inf")})
    progress.update("trainer", {"step": "many"})
    assert "step many/8" in rendered(progress)
    assert "▁ 0.50" in rendered(progress)


def test_without_a_terminal_there_is_a_line_now_and_then(progress, capsys):
    with View(progress, line_every_s=3600, console=Console(file=io.StringIO())) as view:
        view.refresh()
        assert capsys.readouterr().out == ""
        for _ in range(2):  # the second time there is nothing new
            view._next_line = 0
            view.refresh()
        assert capsys.readouterr().out.count("\n") == 1
    assert capsys.readouterr().out.count("\n") == 1  # the last state


def test_a_terminal_gets_the_live_view(progress):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with View(progress, line_every_s=1, console=console) as view:
        progress.update("trainer", {"step": 2, "reward": 0.5})
        view.refresh()
    assert "night" in console.file.getvalue()
    assert "2/8" in console.file.getvalue()


def test_a_warning_is_shown_once(progress, capsys):
    with View(progress, line_every_s=600) as view:
        for warnings in ("the gate: 16", "the gate: 16\nthe gate: 32", "the gate: 16\nthe gate: 32"):
            view.heard("trainer", {"step": 3, "warnings": warnings})
    said = capsys.readouterr()
    assert said.err.splitlines() == ["inflight launch: trainer: the gate: 16", "inflight launch: trainer: the gate: 32"]
    assert "step 3/8" in said.out


def test_the_newest_evaluation_is_shown_with_its_version(progress):
    progress.update("trainer", {"step": 7, "reward": 0.5, "eval_reward": 0.25, "eval_step": 6})
    assert "held-out 0.25 (version 6)" in progress.line()
    assert "held-out 0.25 (version 6)" in rendered(progress)
