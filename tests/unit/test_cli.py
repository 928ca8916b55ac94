"""The command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inflight import __version__, cli


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "zmq", "vllm", "hydra"} & set(done.stdout.split())
