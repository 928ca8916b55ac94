"""Every command of README and docs is one that the program takes: read from the pages, and given to the real parsers.

Launches are composed and checked as far as `--print` does; commands that only read a run are carried out on a made one.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import hydra
import pytest
from documented import PRINTED, ROOT, RUN_BY, commands, mentioned, run_by
from report_samples import make_run

from inflight import cli
from inflight.config.effect import require_effect
from inflight.config.pairings import require_sound
from inflight.launcher.compose import compose

FOREIGN = ("vllm.", "venv", "pip")
"""Modules of others that `python -m` starts in the docs: not this project's to check."""


class Parsed(BaseException):
    """The arguments were taken; nothing was done yet."""


def parse_alone(monkeypatch) -> None:
    """Parsers of subcommands end with Parsed where the work would begin."""
    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)

        def parsed(self, args=None, namespace=None, parse=parse):
            found = parse(self, args, namespace)
            if self.prog == "inflight":
                return found
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parsed)


def test_the_pages_have_commands():
    """Guards against a pattern that finds none, and one that takes text for commands."""
    found = commands()
    kinds = {" ".join(words[:2]) for _, words in found if words[0] == "inflight"}
    assert len(found) > 60
    assert {"inflight launch", "inflight audit", "inflight show", "inflight report", "inflight join"} <= kinds
    assert {"inflight eval", "inflight export", "inflight model", "inflight patch", "inflight trace"} <= kinds
    assert kinds <= {f"inflight {name}" for name in cli._COMMANDS}


@pytest.mark.parametrize("page, words", commands(), ids=lambda each: each if isinstance(each, str) else " ".join(each))
def test_a_documented_command_is_taken(page, words, tmp_path, monkeypatch, capsys):
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        for given in words[2:]:
            name, _, value = given.partition("=")
            assert name in ("ARGS", "SECONDS", "WORKERS", "PYTHON", "INFLIGHT_DEVICE")
            if words[1] == "demo":
                compose("demo", shlex.split(value))
    elif words[0] == "python":
        started(words[2], words[3:], monkeypatch)
    elif words[1] == "launch":
        monkeypatch.chdir(tmp_path)
        shutil.copy(ROOT / "configs" / "dataset.yaml", tmp_path)  # as the page on one's own model says
        given = [word.replace("$address", "10.0.0.1") for word in words[1:]]
        assert cli.main([*given, "--print"]) == 0, capsys.readouterr().err
    else:
        parse_alone(monkeypatch)
        with pytest.raises(Parsed):
            cli.main(words[1:])


def test_options_in_the_text_of_the_page_on_ones_own_model_fit_its_file(tmp_path):
    """Rows of the table of GPUs, and what is added without a GPU."""
    text = (ROOT / "docs" / "own_model.md").read_text()
    shutil.copy(ROOT / "configs" / "dataset.yaml", tmp_path)
    found = re.findall(r"^\| 7 billion[^|]*\| `([^`]+)`", text, re.MULTILINE)
    found += re.findall(r"`(machine=cpu [^`]+)`", text)
    assert len(found) == 3
    for options in found:
        config = compose("dataset", options.split(), tmp_path)
        require_sound(config)
        require_effect(config)


def started(module: str, arguments: list[str], monkeypatch) -> None:
    """`python -m MODULE ARGUMENTS`, as far as its parser, its configuration or, where it has neither, its file."""
    if module.startswith(FOREIGN):
        return
    if module == "pytest":
        assert all((ROOT / each).exists() for each in arguments if each.startswith("tests/"))
        return
    spec = importlib.util.find_spec(f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module)
    assert spec is not None
    source = Path(spec.origin).read_text()
    if "ArgumentParser(" in source:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        parse_alone(monkeypatch)
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    elif decorated := re.search(r'hydra.main\(.*config_path="([^"]+)", config_name="(\w+)"', source):
        folder = Path(spec.origin).parent / decorated[1]
        with hydra.initialize_config_dir(str(folder.resolve()), version_base=None):
            hydra.compose(decorated[2], arguments)


@pytest.mark.parametrize("page, words", mentioned(), ids=lambda each: each if isinstance(each, str) else " ".join(each))
def test_a_module_that_a_page_names_is_there(page, words):
    assert words[2] == "pytest" or importlib.util.find_spec(words[2]) is not None


def test_every_documented_command_has_a_test_that_runs_it():
    """By the table in documented.py, which holds no command that no page has."""
    given = [(page, " ".join(words), run_by(words)) for page, words in commands()]
    assert not [(page, text) for page, text, by in given if by is None]
    for start, by in RUN_BY.items():
        assert any(text.startswith(start) for _, text, _ in given), f"no page has {start!r}"
        file, _, name = by.partition("::")
        if name:
            assert re.search(rf"^(async )?def {name}", (ROOT / file).read_text(), re.MULTILINE), by
    printed = {text for _, text, by in given if by == PRINTED}
    assert all(re.search(r"gpu|bench\.|Qwen|steps=100", text) for text in printed), printed


@pytest.mark.parametrize("name", list(cli._COMMANDS))
def test_every_subcommand_has_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert f"usage: inflight {name}" in capsys.readouterr().out


def test_help_has_examples_that_are_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    examples = re.findall(r"^  inflight ([a-z]+) ", text, re.MULTILINE)
    assert {"launch", "watch", "show", "report", "trace", "audit", "doctor"} == set(examples) & set(cli._COMMANDS)
    for page in re.findall(r"docs/\w+\.md", text):
        assert (ROOT / page).is_file()


def test_commands_that_read_a_run_do_what_the_pages_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "a", "b"):
        make_run(tmp_path / "runs" / name, groups=8)
    reading = ("report", "show", "trace", "watch")
    done = [words for _, words in commands() if words[0] == "inflight" and words[1] in reading]
    assert len(done) >= 6
    for words in done:
        assert cli.main(words[1:]) == 0, f"{words}: {capsys.readouterr().err}"
    assert (tmp_path / "both.html").is_file()
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--config-name is missing; the configurations are: dataset, demo, demo_gpu, tiny"),
        (["tiny"], "--config-name is missing; the configurations are: "),
        (["--config-name", "tiny", "--trainer.steps", "5"], "unknown: --trainer.steps; options of a run are given as"),
    ],
)
def test_a_launch_without_what_it_needs_names_it(arguments, says, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["launch", *arguments])
    assert end.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
