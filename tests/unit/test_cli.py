"""The command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inflight import __version__, cli
from inflight.file_path import file_path, why_impossible


def test_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"inflight {__version__}\n"


def test_model_prints_its_directory(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["model", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path.resolve()}\n"


def test_a_wrong_model_is_one_line_and_code_2(capsys):
    assert cli.main(["model", "nope"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_launch_gets_its_arguments(capsys):
    assert cli.main(["launch", "--config-name", "tiny", "--print", "trainer.steps=3"]) == 0
    assert "steps: 3" in capsys.readouterr().out


def test_options_of_a_launch_stand_in_any_order(capsys):
    given = ["trainer.steps=3", "--config-name", "tiny", "rollout.max_tokens=7", "--print", "seed=5"]
    assert cli.main(["launch", *given]) == 0
    text = capsys.readouterr().out
    assert all(each in text for each in ("steps: 3", "max_tokens: 7", "seed: 5"))


NAMES_OF_PATHS = [
    (["export", "PATH", "out"], "argument RUN|CHECKPOINT"),
    (["export", "run", "PATH"], "argument OUT"),
    (["export", "run", "out", "--chat-template", "PATH"], "argument --chat-template"),
    (["eval", "PATH"], "argument CHECKPOINT|RUN"),
    (["eval", "run", "--run", "PATH"], "argument --run"),
    (["report", "PATH"], "argument RUN"),
    (["report", "run", "--html", "PATH"], "argument --html"),
    (["trace", "PATH"], "argument RUN"),
    (["trace", "run", "--out", "PATH"], "argument --out"),
    (["show", "PATH"], "argument RUN"),
    (["watch", "PATH"], "argument RUN"),
    (["audit", "PATH"], "argument RUN"),
    (["doctor", "--config-dir", "PATH"], "argument --config-dir"),
    (["launch", "--config-dir", "PATH"], "argument --config-dir"),
    (["patch", "check", "--path", "PATH"], "argument --path"),
    (["join", "127.0.0.1", "--key-file", "PATH"], "argument --key-file"),
]


@pytest.mark.parametrize(("arguments", "where"), NAMES_OF_PATHS, ids=[" ".join(each) for each, _ in NAMES_OF_PATHS])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("a\0b", r"'a\x00b' is not allowed: a path without the character NUL"),
        ("/tmp/" + "n" * 256, "nnn…' is not allowed: a path of at most 4095 bytes, with names of at most 255"),
        ("\ud800", r"'\ud800' is not allowed: a path that utf-8 can write"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_by_name(arguments, where, path, says, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([path if each == "PATH" else each for each in arguments])
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {where}: '" in line
    assert line.endswith(says)


@pytest.mark.parametrize("path", ["n" * 255, "/".join(["d" * 200] * 20), "Übung\udc80", ""])
def test_a_path_that_a_file_can_have_is_taken(path):
    assert file_path(path) == Path(path)
    assert why_impossible("ü" * 128) == "a path of at most 4095 bytes, with names of at most 255"
    assert why_impossible("/".join(["d" * 200] * 21)) == "a path of at most 4095 bytes, with names of at most 255"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["launch", "--config-name", "mine"], "run_dir='a\\x00b' is not allowed: a path without the character NUL"),
        (["model", "n" * 300], "is not allowed: a path of at most 4095 bytes, with names of at most 255"),
    ],
)
def test_an_impossible_path_of_a_configuration_is_one_line(tmp_path, capsys, given, says):
    (tmp_path / "mine.yaml").write_text('defaults: [demo, _self_]\nrun_dir: "a\\0b"\n')
    assert cli.main([*given, *(["--config-dir", str(tmp_path)] if given[0] == "launch" else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_run_folder_in_the_home_of_an_unknown_user_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text('defaults: [demo, _self_]\nrun_dir: "~no-such-user/a"\n')
    assert cli.main(["launch", "--config-name", "mine", "--config-dir", str(tmp_path), "--print"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("inflight launch: run_dir='~no-such-user/a' is not allowed: ")


def test_an_interrupted_command_is_one_line(monkeypatch, capsys):
    """Some take seconds to load what they need, before they can handle a signal themselves."""

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "export", ("", interrupted))
    assert cli.main(["export", "a", "b"]) == 130
    assert capsys.readouterr().err == "inflight export: stopped by SIGINT\n"


@pytest.mark.parametrize("arguments", [[], ["dance"]])
def test_an_unknown_command_ends_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "inflight" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli._COMMANDS)


def test_the_command_line_loads_nothing_heavy():
    code = "import sys; from inflight import cli; cli.main(['version']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert not {"torch", "zmq", "vllm", "hydra"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lauch", "lauch is not a command; did you mean launch?"),
        ("xyz\x1b", "xyz is not a command; the commands are launch,"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest_one(capsys, given, says):
    with pytest.raises(SystemExit) as ended:
        cli.main([given])
    assert ended.value.code == 2
    assert f"inflight: error: {says}" in capsys.readouterr().err
