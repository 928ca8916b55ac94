"""What a person sees of a run: in terminals of 80 and 200 columns, on a real pty, and as lines elsewhere."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import time
from pathlib import Path

import pytest
from fake_generator import eventually
from rich.console import Console
from terminal import Terminal

from inflight.config import RunConfig, save
from inflight.launcher.compose import compose
from inflight.view import snapshot, view, watch
from inflight.view.advice import advice
from inflight.view.figures import duration, number, sparkline
from inflight.view.progress import Progress
from inflight.view.record import RecentLines
from inflight.view.stage import stage
from inflight.view.view import View

SHAPE = ["trainer.steps=8", "trainer.groups_per_step=2", "gate.max_lag=4"]


@pytest.fixture(scope="module")
def composed() -> RunConfig:
    return compose("tiny", ["run_dir=night", "generator.count=2", *SHAPE])


@pytest.fixture
def config(composed, tmp_path) -> RunConfig:
    run = dataclasses.replace(composed, run_dir=f"{tmp_path}/night")
    run.path.mkdir()
    return run


@pytest.fixture
def progress(config) -> Progress:
    return Progress(config)


def step(number_: int, **more: object) -> dict[str, object]:
    return {"step": number_, "version": number_, "time_s": 4.0 * number_, "reward": number_ / 8, **more}


def lines(path: Path, *rows: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def busy(progress: Progress) -> None:
    """A run in the middle of its fifth step."""
    folder = progress.config.path
    dropped = {"groups_dropped": {"all rewards equal": 3}, "tokens_masked_by_rule": {"too old": 20}}
    figures = {"lag_mean": 1.5, "lag_max": 3, "tokens_per_s": 412.7, "wait_s": 1.0, "train_s": 3.0}
    lines(folder / "metrics.jsonl", *(step(at, loss=1 / at, **figures, **dropped) for at in range(1, 5)))
    lines(
        folder / "eval.jsonl",
        {"step": 2, "version": 2, "eval/reward": 0.25},
        {"step": 4, "version": 4, "eval/reward": 0.5, "eval/reward_stderr": 0.0281, "eval/questions": 3.0},
    )
    for version in (1, 2, 3):
        swap = {"event": "committed", "generator": "g0", "version": version, "gap_s": 0.0003127, "transfer_s": 0.8123}
        lines(folder / "swaps.jsonl", {**swap, "running": 12})
    progress.update(
        "trainer",
        {"step": 4, "buffer": 3, "in_flight": 4, "buffer_ages": "2 of age 0, 1 of age 1", "phase": "training"},
    )
    progress.update("trainer", {"committed_g0": 3, "behind_g0": 1, "state_g0": "SENDING"})
    progress.update("trainer", {"committed_g1": 4, "behind_g1": 0, "state_g1": "IDLE"})
    progress.update("g0", {"version": 3, "running": 16, "waiting": 3, "tokens_per_s": 210.5})
    progress.update("g1", {"version": 4, "running": 15, "waiting": 0, "tokens_per_s": 99.5})
    progress.update("a0", {"in_flight": 4, "done": 9, "unknown": 1})


def shown(progress: Progress, columns: int, rows: int = 40) -> Terminal:
    """A terminal after the view was shown in it and closed."""
    with Terminal(columns, rows) as terminal:
        with View(progress, line_every_s=1, console=terminal.console()) as live:
            live.refresh()
        terminal.release()
    return terminal


def test_sparkline_spans_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 40) == "▁▂▃▄▅▆▇█"
    assert sparkline([2, 2], 40) == "▁▁"
    assert sparkline([], 40) == ""
    assert sparkline([9, 0, 1], 2) == "▁█"


def test_numbers_and_durations_are_short():
    assert [number(each) for each in (0.3127, 412.7, 12345.6, 7, "starting")] == [
        "0.313",
        "413",
        "12,346",
        "7",
        "starting",
    ]
    assert [duration(each) for each in (5, 65, 3661)] == ["0:05", "1:05", "1:01:01"]


@pytest.mark.parametrize("columns", [80, 200])
def test_all_that_matters_fits_the_window(progress, columns):
    busy(progress)
    text = shown(progress, columns).text
    for said in (
        "inflight night",
        "4/8",
        "0:16 left",
        "reward    ▁▃▅█ 0.5",
        "loss      █▃▁▁ 0.25",
        "held-out  ▁█ 0.5  version 4, ± 0.028, n=3",
        "1.5 mean, 3 max at training   413 tokens/s",
        "buffer    ██████▒▒▒▒▒▒▒▒░░░░░░ 3 of 10 groups wait (2 of age 0, 1",
        "of age 1), 4 under way",
        "groups: 3 all rewards equal · tokens: 80 too old",
        "a0        4 groups under way, 9 done",
        "g0 → 3   gap 0.313 ms   transfer 0.812 s   through 12 sequences",
    ):
        assert said in text or said in " ".join(text.split()), f"{said!r} is not in\n{text}"
    assert re.search(r"g0 +3 +4 arriving +210 +16 +3", text), text
    assert re.search(r"g1 +4 +– \(up to date\) +99.5 +15 +0", text), text
    assert text.count("gap") == 3, "the last three swaps"
    assert len(text.splitlines()) < (22 if columns == 80 else 12), text


@pytest.mark.parametrize(
    ("questions", "left"),
    [
        ({}, "0:16 left"),
        ({"questions": 13}, "0:08 left"),
        ({"questions": 7}, "0:00 left"),
        ({"questions": 99}, "0:16 left"),
    ],
)
def test_the_time_left_ends_where_the_data_do(progress, questions, left):
    """4 s each for 2 questions; 4 of 8 steps are done."""
    busy(progress)
    progress.update("a0", {"in_flight": 1, **questions})
    progress.update("a1", {"in_flight": 1})
    progress.record.refresh()
    assert progress.line().endswith(f" · {left}")
    of = {13: " (data for 6)", 7: " (data for 3)"}.get(questions.get("questions", 0), "")
    assert f"step 4/8{of} · " in progress.line()
    bar = shown(progress, 100).text.splitlines()[1]
    assert f"4/8{of}" in bar
    room = bar.count("━") + bar.count("─")
    assert bar.count("━") == min(round(room * 4 / {13: 6, 7: 3}.get(questions.get("questions", 0), 8)), room)


def test_a_resumed_run_has_no_time_left_before_its_trainer_has_done_a_step(progress):
    busy(progress)
    progress.forget("trainer")
    progress.update("trainer", {"phase": "waiting for generators"})
    progress.record.refresh()
    assert progress.step == 4
    assert " left" not in progress.line()
    progress.update("trainer", {"step": 5})
    assert progress.line().endswith(" · 0:12 left")


def test_a_low_window_says_how_many_generators_it_leaves_out(config):
    many = dataclasses.replace(config, generator=dataclasses.replace(config.generator, count=20))
    text = shown(Progress(many), 80, rows=24).text
    assert "g6" in text
    assert re.search(r"\+13 +more", text), text


def test_many_actors_are_one_row(progress):
    for at in range(16):
        progress.update(f"a{at}", {"in_flight": 4, "done": at, "failed": 0})
    text = shown(progress, 80).text
    assert "actors    16: 64 groups under way, 120 done, 0 failed" in text
    assert "a0 " not in text


def test_before_any_news_everybody_is_starting(progress):
    assert "step 0/8 · starting · g0 starting · g1 starting" in progress.line()
    text = shown(progress, 80).text
    assert re.search(r"trainer +starting", text), text
    assert re.search(r"g0 +– +starting", text), text


def test_a_status_of_the_trainer_that_is_older_than_the_generators_announces_nothing(progress):
    progress.update("trainer", {"committed_g0": 0, "behind_g0": 1, "state_g0": "SENDING"})
    progress.update("g0", {"version": 1})
    text = shown(progress, 80).text
    assert re.search(r"g0 +1 +– \(up to date\)", text), text


def test_a_resumed_run_starts_from_its_step(config):
    progress = Progress(dataclasses.replace(config, checkpoint="night/step-5"))
    assert "step 5/8 · starting" in progress.line()
    progress.update("trainer", {"step": 6})
    assert "step 6/8" in progress.line()


def test_what_a_process_said_before_it_ended_is_shown_no_more(progress):
    for name in ("g0", "g1"):
        progress.update(name, {"version": 3, "running": 4})
    progress.forget("g0")
    progress.forget("a0")  # ended before it said anything
    assert "g0 starting · g1 version 3, 4 running" in progress.line()


def test_the_line_has_the_figures(progress):
    progress.update("g1", {"phase": "loading"})
    assert "g1 loading" in progress.line()
    progress.update("trainer", {"step": 1, "phase": "training", "buffer": 3})
    assert "step 1/8 · training · buffer 3/10 · " in progress.line()
    progress.update(
        "trainer", {"reward": 0.75, "reward_all": 0.75, "lag_mean": 1.5, "lag_max": 3, "tokens_per_s": 412.7}
    )
    progress.update("trainer", {"swaps": 2, "gap_ms": 0.3127, "eval_reward": 0.25, "eval_step": 6})
    progress.update("g1", {"version": 2, "running": 5, "tokens_per_s": 99.5})
    assert (
        "reward 0.75 · lag 1.5 (max 3) · buffer 3/10 · 413 tokens/s · 2 swaps, last gap 0.313 ms · "
        "held-out 0.25 (version 6) · g0 starting · g1 version 2, 5 running, 99.5 tokens/s"
    ) in progress.line()
    progress.update("trainer", {"reward_all": 0.05, "eval_of": "± 0.028, n=3"})
    assert "held-out 0.25 (version 6, ± 0.028, n=3) · " in progress.line()
    assert "reward 0.75 (all 0.05)" in progress.line()


def test_what_is_no_number_ends_no_view(progress):
    for at, reward in ((1, 0.5), (2, None), (3, "NaN")):
        lines(progress.config.path / "metrics.jsonl", {**step(at), "reward": reward, "loss": None})
    swap = {"event": "committed", "generator": "g0", "version": 9, "gap_s": 0.0003, "transfer_s": 0.8, "running": None}
    lines(progress.config.path / "swaps.jsonl", swap)
    progress.update("trainer", {"step": "many", "buffer": "full"})
    text = shown(progress, 80).text
    assert "many/8" in text
    assert "▁ 0.5" in text
    assert "g0 → 9   gap 0.3 ms   transfer 0.8 s   through ? sequences" in text


def test_text_of_a_model_has_no_control_over_the_terminal(progress, capfd):
    """Neither escape sequences nor rich's own markup reach the terminal from what processes report."""
    evil = "\x1b]0;owned\x07\x1b[2J[red]boom[/red]\u202e"
    busy(progress)
    lines(progress.config.path / "metrics.jsonl", step(5, groups_dropped={evil: 4}))
    with Terminal(80, 40) as terminal:
        with View(progress, line_every_s=1, console=terminal.console()) as live:
            live.heard("trainer", {"warnings": f"reward says {evil}", "phase": evil})
            live.heard("a0", {"in_flight": evil})
            live.refresh()
        terminal.release()
    assert b"\x1b]0;" not in terminal.raw
    assert b"\x1b[2J" not in terminal.raw
    assert "\u202e".encode() not in terminal.raw
    assert terminal.text.count("[red]boom[/red]") >= 3, terminal.text
    with View(progress, line_every_s=600, console=Console(file=io.StringIO())) as plain:
        plain.heard("g0", {"phase": evil, "warnings": evil})
    assert "\x1b" not in "".join(capfd.readouterr())


def test_files_are_read_as_they_grow_and_anew_when_they_shrink(config):
    """A torn last line is read when it is whole; a resumed run drops the lines of undone steps."""
    record, path = RecentLines(config.path), config.path / "metrics.jsonl"
    record.refresh()
    assert not record.steps
    lines(path, step(1), step(2))
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    record.refresh()
    assert [row["step"] for row in record.steps] == [1, 2]
    with path.open("a") as file:
        file.write('ard": 1}\nno json\n')
    record.refresh()
    assert [row["step"] for row in record.steps] == [1, 2, 3]
    path.write_text(json.dumps(step(1)) + "\n")
    record.refresh()
    assert [row["step"] for row in record.steps] == [1]


@pytest.mark.parametrize("damaged", [5, ["too old"], {"too old": "three"}])
def test_counts_that_are_damaged_are_left_out(progress, damaged):
    figures = dict.fromkeys(("groups_failed", "groups_dropped", "rollouts_dropped", "tokens_masked_by_rule"), damaged)
    lines(progress.config.path / "metrics.jsonl", step(1), step(2, **figures, tokens_masked_by_ratio={"clip": 20}))
    assert "tokens: 20 clip" in shown(progress, 80).text
    assert "groups" not in shown(progress, 80).text
    assert advice(progress) == []
    assert progress.counted("failed/", "groups_failed") == {}


def test_without_a_terminal_there_is_a_line_now_and_then(progress, capsys):
    with View(progress, line_every_s=3600, console=Console(file=io.StringIO())) as plain:
        plain.refresh()
        assert capsys.readouterr().out == ""
        for _ in range(2):  # the second time there is nothing new
            plain._next_line = 0
            plain.refresh()
        assert capsys.readouterr().out.count("\n") == 1
        plain._same_since = time.monotonic() - view.SAME_LINE_S - 0.1
        plain._next_line = 0
        plain.refresh()
        assert capsys.readouterr().out.count("\n") == 1, "it is never silent for more than 10 s"
    assert capsys.readouterr().out.count("\n") == 1  # the last state


def test_lines_come_less_than_once_a_second_and_at_least_every_ten(config):
    every = config.launch.line_every_s
    assert 1 < every < 10
    assert view.SAME_LINE_S < 2 * every <= 10, "the second line after the last news repeats it"


def test_a_warning_is_shown_once(progress, capsys):
    with View(progress, line_every_s=600, console=Console(file=io.StringIO())) as plain:
        for warnings in ("the gate: 16", "the gate: 16\nthe gate: 32", "the gate: 16\nthe gate: 32"):
            plain.heard("trainer", {"step": 3, "warnings": warnings})
    said = capsys.readouterr()
    assert said.err.splitlines() == ["inflight launch: trainer: the gate: 16", "inflight launch: trainer: the gate: 32"]
    assert "step 3/8" in said.out


FULL, EMPTY = {"wait_s": 0.1, "train_s": 3.0}, {"wait_s": 3.0, "train_s": 1.0}


@pytest.mark.parametrize(
    "rows, status, said",
    [
        (FULL, {}, []),
        (FULL, {"behind_g1": 3, "committed_g1": 1, "state_g1": "SENDING"}, ["g1 is 3 versions behind"]),
        (FULL, {"behind_g1": 2}, []),
        (FULL, {"state_g0": "POISONED"}, ["g0 may hold parts of two versions"]),
        (EMPTY, {}, ["The buffer is empty too often: the trainer waits for rollouts 75% of its time"]),
        (FULL, {"buffer": 10}, ["The buffer is full (10 of 10 groups)"]),
        (FULL, {"buffer": 9}, []),
        (FULL, {"failed/reward timeout": 4}, ["A reward times out (4 groups lost)"]),
        (FULL, {"failed/reward error: ValueError": 4}, ["A reward fails: reward error: ValueError (4 groups lost)"]),
        (FULL, {"dropped/all rewards equal": 30}, ["The gate drops more groups than are trained on (30 of 40"]),
        (FULL, {"dropped/all rewards equal": 9}, []),
        ({**FULL, "lag_0": {"agrees": False, "median": 0.25}}, {}, ["At lag 0 generator and trainer disagree ("]),
        ({**FULL, "lag_0": {"agrees": True, "median": 0.0}}, {}, []),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(progress, rows, status, said):
    lines(progress.config.path / "metrics.jsonl", *(step(at, **rows) for at in range(1, 6)))
    progress.record.refresh()
    progress.update("trainer", {"step": 5, **status})
    progress.update("g0", {"version": 5})
    found = advice(progress)
    assert len(found) == len(said), found
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True)), found
    if said:
        assert found[0] in " ".join(line.strip(" !") for line in shown(progress, 80).text.splitlines())


def test_of_a_reward_that_fails_the_first_failure_and_the_log_are_named(progress):
    reason = "reward odd error: ValueError"
    progress.update("trainer", {"step": 5, f"failed/{reason}": 4})
    (said,) = advice(progress)
    assert said == f"A reward fails: {reason} (4 groups lost). The actor's log (logs/a*.log) has the first one."
    progress.update("a0", {"first_failed/reward other error: KeyError": "no"})
    progress.update("a1", {f"first_failed/{reason}": "q4: no digit\x1b[2J"})
    (said,) = advice(progress)
    assert said.startswith(f"A reward fails: {reason} (4 groups lost). The first, in logs/a1.log: q4: no digit")
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "generators, phase, generator, says",
    [
        (2, "training", {"version": 5}, "Fewer generators or a faster trainer would make tokens younger."),
        (1, "training", {"version": 5}, "A faster trainer would make tokens younger."),
        (2, "training", {"phase": "starting"}, None),
        (2, "waiting for generators", {"version": 5}, None),
    ],
)
def test_of_a_full_buffer_is_said_only_what_can_be_changed(config, generators, phase, generator, says):
    """At a resume it may be full of the groups of the start before, while no generator works yet."""
    shape = dataclasses.replace(config.generator, count=generators)
    progress = Progress(dataclasses.replace(config, generator=shape, chosen=None))
    lines(config.path / "metrics.jsonl", *(step(at, **FULL) for at in range(1, 6)))
    progress.record.refresh()
    progress.update("trainer", {"step": 5, "buffer": 10, "phase": phase})
    progress.update("g0", generator)
    found = [text.partition("trainer. ")[2] for text in advice(progress)]
    assert found == ([says] if says else [])


@pytest.mark.parametrize(
    ("elapsed_s", "phase", "said"),
    [(61, "waiting for generators", True), (61, "loading", False), (0, "waiting for generators", False)],
)
def test_a_start_of_vllm_that_takes_long_is_explained(progress, elapsed_s, phase, said):
    progress.began(elapsed_s)
    progress.update("trainer", {"phase": phase})
    found = "\n".join(advice(progress))
    assert ("vLLM is still starting: logs/g*.log has its progress." in found) == said
    assert ("300 s after the trainer (publish.join_timeout_s)" in found) == said


@pytest.mark.parametrize(("count", "named"), [(1, "logs/g0.log"), (2, "logs/g*.log")])
def test_a_slow_start_names_the_log_that_there_is(config, count, named):
    progress = Progress(dataclasses.replace(config, generator=dataclasses.replace(config.generator, count=count)))
    progress.began(61)
    progress.update("trainer", {"phase": "waiting for generators"})
    assert f"vLLM is still starting: {named} has its progress." in "\n".join(advice(progress))


def test_advice_is_a_line_without_a_terminal(progress, capsys):
    lines(progress.config.path / "metrics.jsonl", *(step(at, **EMPTY) for at in range(1, 6)))
    with View(progress, line_every_s=1, console=Console(file=io.StringIO())) as plain:
        for _ in range(2):
            plain._next_line = 0
            plain.refresh()
    assert capsys.readouterr().err.count("The buffer is empty too often") == 1


def test_a_stage_that_takes_long_says_so(capsys, monkeypatch):
    monkeypatch.setattr("inflight.view.stage.QUIET_S", 0.05)
    monkeypatch.setattr("inflight.view.stage.EVERY_S", 0.05)
    with stage("preparing the model"):
        deadline = time.monotonic() + 20
        while (said := capsys.readouterr().out).count("preparing the model …") < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert re.search(r"^preparing the model … \d+ s$", said, re.M)
    with Terminal(80, 10) as terminal:
        with stage("preparing the model", terminal.console()):
            eventually(lambda: "preparing the model …" in terminal.text)
        terminal.release()
    assert not terminal.text, "nothing of it is left on the screen"


def test_a_stage_says_how_far_it_has_come(monkeypatch):
    """On the console that is given: lines without a terminal, else a text that changes."""
    monkeypatch.setattr("inflight.view.stage.QUIET_S", 0.05)
    monkeypatch.setattr("inflight.view.stage.EVERY_S", 0.05)
    done = itertools.count(1)
    file = io.StringIO()
    with stage(lambda: f"{next(done)} of 9", Console(file=file)):
        eventually(lambda: re.search(r"^2 of 9 … \d+ s$", file.getvalue(), re.M))
    assert re.search(r"^1 of 9 … \d+ s$", file.getvalue(), re.M)
    came = 1
    with Terminal(80, 10) as terminal:
        with stage(lambda: f"{came} of 9", terminal.console()):
            eventually(lambda: "1 of 9 …" in terminal.text)
            came = 2
            eventually(lambda: "2 of 9 …" in terminal.text)
        terminal.release()


def test_watch_shows_what_the_launcher_sees(config, progress, capsys, monkeypatch):
    """The launcher's view leaves a snapshot, from which another process shows the same."""
    save(config)
    (config.path / "bus").mkdir()
    busy(progress)
    monkeypatch.setattr(watch, "is_running", lambda _: True)  # no process holds the folder's lock
    with View(progress, line_every_s=600, console=Console(file=io.StringIO()), kept=config.snapshot_file) as live:
        live.refresh()
        mine = progress.news()
    capsys.readouterr()
    assert watch.main([str(config.path), "--once"]) == 0
    out = capsys.readouterr().out
    assert mine in out


def test_watch_of_a_run_that_has_ended_needs_no_snapshot(config, progress, capsys):
    save(config)
    busy(progress)
    assert watch.main([str(config.path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "step 4/8 · has ended"  # no time spent, which would be that of the view
    assert "ended early, 4 of 8 steps" in out


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        ("step-000002", "step-000002 is kept; to resume from it: "),
        ("", "no checkpoint was written, and 4 steps are lost; to begin again at step 0: "),
    ],
)
def test_watch_says_where_a_run_resumes_whose_launcher_was_killed(config, progress, capsys, checkpoint, says):
    """A launcher that ends by itself has said it, and writes a summary."""
    save(config)
    busy(progress)
    if checkpoint:
        (config.path / "checkpoints" / checkpoint).mkdir(parents=True)
    assert watch.main([str(config.path)]) == 0
    command = f"the command of its start with resume=true run_dir={config.run_dir}"
    assert capsys.readouterr().out.splitlines()[-1] == f"{says}{command}"
    (config.path / "summary.json").touch()
    assert watch.main([str(config.path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ended early, 4 of 8 steps"


def test_watch_names_itself_before_a_warning(config, progress, capsys, monkeypatch):
    save(config)
    (config.path / "bus").mkdir()
    monkeypatch.setattr(watch, "is_running", lambda _: True)
    progress.update("trainer", {"warnings": "the gate: 16"})
    snapshot.write(config.snapshot_file, 1.0, progress.latest)
    assert watch.main([str(config.path), "--once"]) == 0
    assert capsys.readouterr().err == "inflight watch: trainer: the gate: 16\n"


def test_the_screen_of_a_run_that_has_ended_has_no_time(progress):
    busy(progress)
    assert "0:16 left" in shown(progress, 100).text
    progress.end()
    assert re.search(r"\d:\d\d", shown(progress, 100).text.splitlines()[0]) is None


def test_watch_refuses_in_one_line(config, tmp_path, capsys):
    assert watch.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == (
        f"inflight watch: {tmp_path}/none is not a run folder, or not yet: "
        "the launcher makes it when its checks are done\n"
    )
    save(config)
    (config.path / "bus").mkdir()
    config.snapshot_file.write_text('{"time": 1')
    assert watch.main([str(config.path), "--once"]) == 2
    assert "status.json is damaged, or of another release" in capsys.readouterr().err
    assert snapshot.read(config.path / "none.json") is None
