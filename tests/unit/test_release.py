"""Which release wrote a run folder, and what commands make of folders that another one wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from inflight import __version__, cli, config
from inflight.config import ConfigError, ModelConfig, RunConfig, TaskConfig, release
from inflight.launcher import launch
from inflight.metrics import METRICS_FILE
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.frames import StreamError
from inflight.rollout.part import MAGIC, SCHEMA
from inflight.rollout.stream import Reader, Writer
from inflight.trainer.checkpoint import index

OLD = "# written by inflight 0.0.9\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    config.save(RunConfig(run_dir=str(run), model=ModelConfig(name="tiny"), task=TaskConfig(name="addition")))
    return run


def as_written_by(header: str, run_dir: Path, **changes: object) -> None:
    """Replaces the first line of the folder's configuration, and some of its values."""
    path = run_dir / release.CONFIG_FILE
    values = {**yaml.safe_load(path.read_text()), **changes}
    path.write_text(header + yaml.safe_dump({name: each for name, each in values.items() if each is not None}))


def stream(run_dir: Path, start: bytes) -> Path:
    """A rollout file that begins so."""
    path = run_dir / ROLLOUTS_FILE
    path.parent.mkdir()
    path.write_bytes(start)
    return path


def test_a_run_folder_names_the_release_that_wrote_it(run_dir):
    assert (run_dir / "config.yaml").read_text().splitlines()[0] == f"# written by inflight {__version__}"
    assert (release.written_by(run_dir), release.remark(run_dir)) == (__version__, "")
    assert config.load(run_dir).task.name == "addition"


def test_a_printed_configuration_is_a_folders_file(run_dir, capsys):
    """docs/own_trainer.md makes one so."""
    assert launch.main(["--config-name", "tiny", "--print"]) == 0
    (run_dir / "config.yaml").write_text(capsys.readouterr().out)
    assert release.written_by(run_dir) == __version__
    assert config.load(run_dir).model.name == "tiny"


def test_a_file_without_options_is_refused_as_such(run_dir):
    """A refused --print leaves an empty one behind the shell's redirection."""
    for text in ("", release.HEADER):
        (run_dir / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"/config\.yaml holds no options: the command .* failed$"):
            config.load(run_dir)


@pytest.mark.parametrize("header", ["", OLD])
def test_a_folder_of_before_an_option_is_read_with_its_default(run_dir, header):
    expected = config.load(run_dir)
    as_written_by(header, run_dir, launch=None, rewards=None, chosen=None)
    assert config.load(run_dir) == expected


@pytest.mark.parametrize(
    ("header", "remark"),
    [
        ("", f"the folder was written by a release that did not record itself, this is {__version__}"),
        (OLD, f"the folder was written by 0.0.9, this is {__version__}"),
    ],
)
def test_a_folder_with_an_unknown_option_is_refused_by_its_release(run_dir, header, remark):
    as_written_by(header, run_dir, teleport=True)
    with pytest.raises(ConfigError, match=r"config.yaml: .*teleport.*") as refused:
        config.load(run_dir)
    assert str(refused.value).endswith(f" ({remark})")
    assert "\n" not in str(refused.value)


def test_an_error_in_a_folder_of_this_release_blames_no_other(run_dir):
    as_written_by(release.HEADER, run_dir, teleport=True)
    with pytest.raises(ConfigError) as refused:
        config.load(run_dir)
    assert "written by" not in str(refused.value)


@pytest.mark.parametrize("start", [b"# written by inflight " + b"9" * 200 + b"\n", b"# written by", b"\xff\xfe", b""])
def test_a_damaged_first_line_names_no_release(run_dir, start):
    (run_dir / "config.yaml").write_bytes(start)
    assert release.written_by(run_dir) == ""


def test_a_rollout_file_of_another_schema_is_refused_by_its_number(run_dir):
    path = stream(run_dir, MAGIC[:-1] + bytes([SCHEMA + 1]))
    says = f"is of schema {SCHEMA + 1}; this release reads streams of schema {SCHEMA}"
    for read in (lambda: list(Reader(path)), lambda: Writer(path)):
        with pytest.raises(StreamError, match=says):
            read()


def test_a_checkpoint_of_another_schema_is_refused_by_its_number(run_dir):
    folder = run_dir / "checkpoints" / "step-000004"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "state.json").write_text('{"schema": 7, "step": 4, "unknown": []}')
    as_written_by(OLD, run_dir)
    with pytest.raises(index.CheckpointError) as refused:
        index.read(folder)
    says = f"is of schema 7, this release reads schema {index.SCHEMA} (the folder was written by 0.0.9, this is "
    assert says in str(refused.value)


@pytest.mark.parametrize("command", ["audit", "report", "show"])
def test_a_command_refuses_another_schema_in_one_line(run_dir, capsys, command):
    as_written_by(OLD, run_dir, audit={"keep_versions": True})
    (run_dir / "versions").mkdir()
    (run_dir / "versions" / "000000.safetensors").write_bytes(b"")
    (run_dir / METRICS_FILE).write_text('{"step": 1, "version": 1}\n')
    stream(run_dir, MAGIC[:-1] + b"\x01")
    assert cli.main([command, str(run_dir)]) == 2
    *_, line = capsys.readouterr().err.splitlines()  # `show` says before that it has no tokenizer
    assert line.startswith(f"inflight {command}: ")
    assert line.endswith(f"is of schema 1; this release reads streams of schema {SCHEMA}")


def test_a_report_of_another_releases_metrics_names_it(run_dir, capsys):
    as_written_by(OLD, run_dir)
    (run_dir / METRICS_FILE).write_text('{"step": 1, "version": 1}\n')
    (run_dir / "swaps.jsonl").write_text('{"event": "committed"}\n')
    assert cli.main(["report", str(run_dir)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"is damaged: KeyError: 'time_s' (the folder was written by 0.0.9, this is {__version__})")
