"""What a user's own task does when it is looked at costs a line, not the launcher, and no engine is started for it."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_generator import eventually

from inflight.config import ConfigError
from inflight.launcher import launch, preflight
from inflight.launcher.compose import compose
from inflight.processes import living_of

TASK = """
from dataclasses import dataclass

@dataclass
class T:
    seed: int
    digits: int = 2

    def score(self, item, completion):
        return 1.0
"""
SPEAKS = """
import atexit, threading, time
atexit.register(print, "last words")
threading.Thread(target=time.sleep, args=(600,)).start()
"""
"""Keeps its process from ending, and has the last word in it."""
NAMED = ["--config-name", "tiny", "task.name=mine:T"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of the task, in the folder that the run is started in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise RuntimeError('no data\\nset')", "can't be imported: RuntimeError: no data set (/TMP/mine.py, line 1)"),
        ("import nowhere", "can't be imported: No module named 'nowhere'"),
        ("T = 3", "is not a dataclass with a field 'seed'"),
        ("def T(:", "can't be imported: SyntaxError: invalid syntax"),
        ("import sys; sys.exit('no GPU')", "can't be imported: SystemExit: no GPU (/TMP/mine.py, line 1)"),
        (TASK + "import sys; sys.exit()", "can't be imported: SystemExit (/TMP/mine.py"),
        (TASK + "import os; os._exit(0)", "can't be made: its process ended with code 0 and said nothing"),
        (TASK + "\n    def __post_init__(self): import sys; sys.exit(0)", "can't be made: SystemExit: 0 (/TMP/mine.py"),
        (SPEAKS + TASK + "\n    def __post_init__(self): raise OSError('no disk')", "can't be made: OSError: no disk"),
        ("import os; os._exit(139)", "can't be made: its process ended with code 139 and said nothing"),
        ("import os; os.kill(os.getpid(), 11)", "can't be made: its process ended with SIGSEGV and said nothing"),
        (
            TASK + "\n    def __post_init__(self): raise OSError('no disk')",
            "can't be made: OSError: no disk (/TMP/mine.py",
        ),
    ],
)
def test_a_task_that_can_not_be_made_is_one_line_and_code_2(mine, tmp_path, capsys, code, says):
    mine.write_text(code)
    assert launch.main([*NAMED, f"run_dir={tmp_path}/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.replace(str(tmp_path), "/TMP").startswith(f"inflight launch: task.name='mine:T' {says}")
    assert not (tmp_path / "run").exists()


def test_an_option_that_a_users_task_does_not_have_is_refused(mine, tmp_path, capsys):
    mine.write_text(TASK)
    assert launch.main([*NAMED, f"run_dir={tmp_path}/run", "+task.options.letters=3"]) == 2
    assert "task.options.letters is not an option of task mine:T: digits" in capsys.readouterr().err


HANGS = """
import os, re, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pid.partial", "w") as file:
    file.write(str(child.pid))
os.rename("pid.partial", "pid")
re.match(r"(a+)+$", "a" * 40 + "!")
"""


def test_one_that_hangs_is_refused_and_leaves_nothing_behind(mine, tmp_path, monkeypatch):
    """It holds the GIL, and has started a process of its own."""
    mine.write_text(HANGS)
    for limit_s in (8.0, 90.0):  # the second is for a machine on which the imports before it take so long
        monkeypatch.setattr(preflight, "CHECK_S", limit_s)
        says = rf"task\.name='mine:T' can't be imported: it takes longer than {limit_s:.0f} s"
        with pytest.raises(ConfigError, match=says):
            preflight._require_task(compose("tiny", ["task.name=mine:T"]))
        if (tmp_path / "pid").exists():
            break
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: not living_of([each for each in psutil.process_iter() if each.pid == child]), "its child's end")


@pytest.mark.parametrize(
    "more", ["", "\n" + SPEAKS, f"\n    def __post_init__(self): import os; os.kill(os.getpid(), {signal.SIGALRM})"]
)
def test_one_that_can_be_made_or_takes_its_time_is_taken(mine, more):
    mine.write_text(TASK + more)
    preflight._require_task(compose("tiny", ["task.name=mine:T"]))
    assert "mine" not in sys.modules


@pytest.mark.vllm
@pytest.mark.parametrize("extra", ["kv_offloading_size: 1", "kv_transfer_config: {kv_connector: ExampleConnector}"])
def test_kv_outside_the_engine_is_refused_before_anything_starts(tmp_path, capsys, extra):
    arguments = ["--config-name", "tiny", f"run_dir={tmp_path}/run", f"generator.extra={{{extra}}}"]
    assert launch.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"inflight launch: generator.extra.{extra.partition(':')[0]}=")
    assert "swaps do not support KV caches outside the engine: what they hold outlives a swap" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.vllm
def test_a_token_that_no_completion_can_end_with_is_refused(tmp_path, tiny_model, capsys):
    config = compose("tiny", ["rollout.stop_token_ids=[16]"])
    preflight._require_tokens(config, config.model)
    arguments = ["--config-name", "tiny", f"run_dir={tmp_path}/run", "rollout.stop_token_ids=[1,17,99]"]
    assert launch.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    says = "rollout.stop_token_ids=[17, 99] is not allowed:"
    assert line == f"inflight launch: {says} {tiny_model} has tokens 0 to 16"


@pytest.mark.parametrize(("served", "expected"), [("", "tiny"), ("mine", "mine")])
def test_requests_call_the_model_by_the_name_that_it_was_given(tiny_model, served, expected):
    given = compose("tiny", []).model
    placed = preflight._placed(replace(given, served_name=served))
    assert (placed.name, placed.served_name) == (str(tiny_model), expected)
