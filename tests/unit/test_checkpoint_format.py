"""What a checkpoint's directory is to others, how it is written beside the training, and its export."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_run import Run, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import cli
from inflight.config import ConfigError, ModelConfig, RunConfig, TaskConfig, TrainerConfig, save
from inflight.export import export
from inflight.locked_folder import locked_folder
from inflight.rollout.books import NO_BOOKS
from inflight.trainer import loop
from inflight.trainer.checkpoint import io
from inflight.trainer.checkpoint.index import SCHEMA, CheckpointError, Saved, newest
from inflight.trainer.checkpoint.snapshot import take
from inflight.trainer.checkpoint.writer import CheckpointWriter
from inflight.trainer.optimizer import make_optimizer
from inflight.trainer.run_policy import policy_of
from inflight.weights.source import WeightSource

IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(params=["tiny_model", "tiny_untied_model"])
def model_dir(request) -> Path:
    return request.getfixturevalue(request.param)


def trained(model_dir: Path):
    """A model that bfloat16 can't hold exactly, and its optimizer after a step."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = make_optimizer(model, TrainerConfig(learning_rate=1e-3))
    model(IDS).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    return model, optimizer


def written(folder: Path, model_dir: Path, **settings) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of step 4, and the weights that it is of."""
    model, optimizer = trained(model_dir)
    saved = Saved(schema=SCHEMA, step=4, elapsed_s=1.0, books=NO_BOOKS)
    path = io.save_checkpoint(folder, saved, take(model, optimizer), model, model_dir, **settings)
    return path, model.state_dict()


def resumed(checkpoint: Path, model_dir: Path, *, bfloat16: bool = True):
    config = RunConfig(
        model=ModelConfig(name=str(model_dir)),
        task=TaskConfig("addition"),
        run_dir="run",
        checkpoint=str(checkpoint),
        trainer=TrainerConfig(autocast=bfloat16),
    )
    return policy_of(config, checkpoint, torch.device("cpu"))


def logits(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)(IDS).logits


@pytest.mark.parametrize("shard_bytes", [io.SHARD_BYTES, 400_000])
def test_rounded_weights_are_a_model_and_a_run_resumes_from_exact_ones(tmp_path, model_dir, shard_bytes):
    path, weights = written(tmp_path, model_dir, dtype="bfloat16", shard_bytes=shard_bytes)
    files = sorted(path.glob("*.safetensors"))
    assert (len(files) > 2) == (path / "model.safetensors.index.json").exists() == (shard_bytes < 1e6)
    assert {each.dtype for file in files for each in load_file(file).values()} == {torch.bfloat16}
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    as_it_says = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert as_it_says.dtype == torch.bfloat16
    assert all(torch.equal(each, weights[name].bfloat16()) for name, each in as_it_says.state_dict().items())

    policy = resumed(path, model_dir)
    assert all(torch.equal(each, weights[name]) for name, each in policy.master.state_dict().items())
    assert policy.master.dtype == torch.float32
    assert all(torch.equal(each, weights[name].bfloat16()) for name, each in policy.compute.state_dict().items())


def test_rounded_weights_alone_are_nothing_to_resume_from(tmp_path, tiny_untied_model):
    path, _ = written(tmp_path, tiny_untied_model, dtype="bfloat16")
    master = path / io.MASTER_FILE
    whole = load_file(master)
    for change, says in (
        (lambda: io.save_file({"x": torch.zeros(1)} | whole, master), "has x, which is no parameter"),
        (lambda: io.save_file({**whole, "lm_head.weight": torch.zeros(2)}, master), "no lm_head.weight, or one of"),
        (lambda: master.write_bytes(b"no"), "can't be read"),
        (master.unlink, r"holds weights in bfloat16 and no trainer/master\.safetensors"),
    ):
        change()
        with pytest.raises(CheckpointError, match=says):
            resumed(path, tiny_untied_model)


def test_a_checkpoint_is_written_beside_the_training_and_is_of_its_own_step(tmp_path, monkeypatch):
    """The write of step 1 does not end before version 2 is published."""
    published, save, publish = threading.Event(), loop.save_checkpoint, loop.Trainer.publish

    def late(folder, saved, *rest):
        if saved.step == 1:
            assert published.wait(60)
            assert newest(run.folder) is None
        return save(folder, saved, *rest)

    def publishing(trainer, version):
        report = publish(trainer, version)
        if version == 2:
            published.set()
        return report

    monkeypatch.setattr(loop, "save_checkpoint", late)
    monkeypatch.setattr(loop.Trainer, "publish", publishing)
    run = Run(tmp_path, steps=3, checkpoint_every=1).start()
    try:
        assert train(run) == 0
        for step in (1, 2, 3):
            kept = load_file(run.config.version_file(step))
            stored = load_file(run.folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
            assert all(torch.equal(stored[name].bfloat16(), each) for name, each in kept.items())
    finally:
        run.close()


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_the_next_step(tmp_path, monkeypatch, capfd):
    def full(folder, saved, *_):
        raise OSError(f"step {saved.step}: No space left on device")

    def start_and_wait(writer, name, write):
        start(writer, name, write)
        writer._thread.join()

    monkeypatch.setattr(loop, "save_checkpoint", full)
    monkeypatch.setattr(CheckpointWriter, "start", start_and_wait)
    run = Run(tmp_path, steps=5, checkpoint_every=2).start()
    try:
        assert train(run) == 1
    finally:
        run.close()
    assert "step 2: No space left on device" in capfd.readouterr().err.splitlines()[-1]
    assert [line["step"] for line in run.lines()] == [1, 2]


start = CheckpointWriter.start


def test_a_write_that_does_not_end_is_named_and_waited_for_no_longer(caplog):
    release, writer = threading.Event(), CheckpointWriter(0.05)
    writer.start("step-000004", release.wait)
    for wait in (writer.wait, lambda: writer.start("step-000005", lambda: None)):
        with pytest.raises(TimeoutError, match=r"step-000004 is not written after 0\.05 s"):
            wait()
    writer.close()
    assert "step-000004 is not written" in caplog.text
    release.set()
    writer._thread.join(10)
    writer.wait()


def test_what_went_wrong_is_raised_once(caplog):
    def fail():
        raise OSError("full")

    writer = CheckpointWriter(10)
    for wait in (writer.wait, lambda: writer.start("b", lambda: None)):
        writer.start("a", fail)
        with pytest.raises(OSError, match="full"):
            wait()
        writer.wait()
    writer.start("a", fail)
    writer.close()
    assert "full" in caplog.text


def test_a_snapshot_does_not_change_with_the_model(tiny_model):
    model, optimizer = trained(tiny_model)
    snapshot = take(model, optimizer)
    before = {name: each.clone() for name, each in (snapshot.weights | snapshot.moments).items()}
    model(IDS).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    assert all(torch.equal(each, before[name]) for name, each in (snapshot.weights | snapshot.moments).items())
    assert snapshot.weights["lm_head.weight"] is snapshot.weights["model.embed_tokens.weight"]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("shard_bytes", [io.SHARD_BYTES, 400_000])
def test_an_export_is_the_model_alone(tmp_path, model_dir, dtype, shard_bytes, capsys):
    path, weights = written(tmp_path / "run" / "checkpoints", model_dir, shard_bytes=shard_bytes)
    (tmp_path / "run" / "config.yaml").write_text("")
    out = tmp_path / "out"
    arguments = ["export", str(tmp_path / "run"), str(out), *(["--dtype", dtype] if dtype else [])]
    assert cli.main(arguments) == 0
    name = dtype or "float32"
    assert capsys.readouterr().out == f"{out}: the model of {path}, {name}\n"
    torch_dtype = getattr(torch, name)
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch_dtype
    assert torch.equal(logits(out, torch_dtype), logits(path, torch_dtype))
    stored = {key: each for file in out.glob("*.safetensors") for key, each in load_file(file).items()}
    assert all(torch.equal(each, weights[key].to(torch_dtype)) for key, each in stored.items())
    if (out / "model.safetensors.index.json").exists():
        values = json.loads((out / "model.safetensors.index.json").read_text())
        assert values["metadata"]["total_size"] == sum(each.nbytes for each in stored.values())
        assert values["weight_map"].keys() == stored.keys()
    assert {each.name for each in out.iterdir()} == {each.name for each in path.iterdir()} - {"trainer"}
    assert AutoTokenizer.from_pretrained(out)("1+2=")["input_ids"]
    assert cli.main(["export", str(path), str(tmp_path / "again")]) == 0


def test_an_export_of_the_newest_checkpoint_names_the_best_where_that_is_another(tmp_path, tiny_model, capsys):
    run = tmp_path / "run"
    path, _ = written(run / "checkpoints", tiny_model)
    (run / "config.yaml").write_text("")

    def exported(source, out):
        assert cli.main(["export", str(source), str(tmp_path / out)]) == 0
        return capsys.readouterr().out.removeprefix(f"{tmp_path / out}: the model of ")

    shutil.copytree(path, run / "best" / path.name)
    assert exported(run, "same") == f"{path}, float32\n"
    (run / "best" / path.name).rename(best := run / "best" / "step-000001")
    assert exported(run, "other") == f"{path}, float32; the best by held-out questions: {best}\n"
    assert exported(best, "best") == f"{best}, float32\n"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_all_files_of_a_checkpoint_follow_the_umask(tmp_path, tiny_model, umask):
    """A server may be another user's."""
    before = os.umask(umask)
    try:
        path, _ = written(tmp_path, tiny_model, dtype="bfloat16")
    finally:
        os.umask(before)
    files = [each for each in path.rglob("*") if each.is_file()]
    assert {each.name for each in files} >= {"model.safetensors", "master.safetensors", "config.json"}
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o666 & ~umask}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_file_of_a_version_follows_the_umask(tmp_path, tiny_model, umask):
    """Also where a process that was killed has left a part of it."""
    model, _ = trained(tiny_model)
    path = tmp_path / "versions" / "000003.safetensors"
    path.parent.mkdir()
    path.with_suffix(".partial").touch(mode=0o600)
    before = os.umask(umask)
    try:
        io.keep_version(WeightSource(model, "bfloat16"), 3, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert load_file(path)


def test_an_export_that_is_not_possible_is_one_line(tmp_path, tiny_model, capsys):
    def line(*arguments) -> str:
        assert cli.main(["export", *map(str, arguments)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        return said.removeprefix("inflight export: ")

    path, _ = written(tmp_path / "run" / "checkpoints", tiny_model, dtype="bfloat16")
    out = tmp_path / "out"
    capsys.readouterr()  # transformers shows how far it is
    assert line(tmp_path / "nothing", out) == (
        f"{tmp_path}/nothing is neither a run folder nor a checkpoint: it has no config.yaml or config.json"
    )
    assert line(path, out, "--dtype", "float32").endswith("holds weights in bfloat16")
    assert line(path, path) == f"{path} exists: name a directory that does not"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("")
    assert line(tmp_path / "empty", out) == f"{tmp_path}/empty has no checkpoint yet"
    (tmp_path / "empty" / "checkpoints" / "step-000002").mkdir(parents=True)
    expected = f"{tmp_path}/empty/checkpoints/step-000002 is no checkpoint: it has no config.json"
    assert line(tmp_path / "empty", out) == expected
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    shutil.copytree(path, tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"no")
    io.note_dtype(tmp_path / "torn", "float32")
    for dtype in ([], ["--dtype", "bfloat16"]):
        assert "torn is not whole: model.safetensors can't be read" in line(tmp_path / "torn", out, *dtype)
    io.save_file({"a": torch.tensor([1e30])}, tmp_path / "torn" / "model.safetensors")
    assert "does not fit into float16" in line(tmp_path / "torn", out, "--dtype", "float16")
    (tmp_path / "torn" / "model.safetensors").unlink()
    assert line(tmp_path / "torn", out) == f"{tmp_path}/torn is not whole: it has no model.safetensors"
    assert {each.name for each in tmp_path.iterdir()} == {"run", "empty", "torn"}


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_a_signal_ends_an_export_in_one_line_and_nothing_of_it_is_left(tmp_path, tiny_model, monkeypatch, capsys):
    path, _ = written(tmp_path / "run", tiny_model)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}  # as a shell may not have it
    try:
        for number in numbers:

            def interrupted(*_: object, number: signal.Signals = number) -> None:
                assert len(names(tmp_path)) == 2
                signal.raise_signal(number)

            monkeypatch.setattr("shutil.copyfile", interrupted)
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                cli.main(["export", str(path), str(tmp_path / "out")])
            assert ended.value.code == 128 + number
            assert capsys.readouterr().err == f"inflight export: stopped by {number.name}\n"
            assert names(tmp_path) == {"run"}
            assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_export_to_a_file_system_without_locks_is_made(tmp_path, monkeypatch):
    """Its folder has no lock by which another export would take it for one of a process that was killed."""

    def without_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with locked_folder(tmp_path, ".out.partial-") as folder:
        monkeypatch.undo()
        with locked_folder(tmp_path, ".out.partial-"):
            assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_has_left_is_removed_by_the_next_one_to_the_same_place(tmp_path, tiny_model):
    path, _ = written(tmp_path / "run", tiny_model)
    killed = """
import os, signal, sys
from pathlib import Path
from inflight.locked_folder import locked_folder
parent = Path(sys.argv[1])
with locked_folder(parent, ".out[1].partial-"), locked_folder(parent, ".other.partial-"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with locked_folder(tmp_path, ".out[1].partial-") as living:  # an export to the same place that is under way
        done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], timeout=180, check=False)
        assert done.returncode == -signal.SIGKILL
        assert len(names(tmp_path)) == 4
        export(path, tmp_path / "out[1]")
        assert living.is_dir()
        (other,) = names(tmp_path) - {"run", "out[1]", living.name}
        assert other.startswith(".other.partial-")
    assert "config.json" in names(tmp_path / "out[1]")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda shard, index: shard.unlink(), "is not whole: it has no model-00002-of-"),
        (lambda shard, index: shard.write_bytes(shard.read_bytes()[:-1]), "-of-.*can't be read"),
        (lambda shard, index: io.save_file({"a": torch.zeros(1)}, shard), "has no .*, which model.safetensors.index"),
        (lambda shard, index: index.write_text("{"), "index.json can't be read"),
        (
            lambda shard, index: index.write_text('{"weight_map": {"a": "../a"}}'),
            "places a in '../a', which is no file",
        ),
        (lambda shard, index: index.unlink(), "is not whole: it has no model.safetensors"),
    ],
)
def test_half_a_checkpoint_is_neither_exported_nor_evaluated(tmp_path, tiny_untied_model, capsys, damage, says):
    """transformers and vLLM would fill in what is missing at random, or fail when it is served."""
    path, _ = written(tmp_path / "run" / "checkpoints", tiny_untied_model, shard_bytes=400_000)
    config = RunConfig(ModelConfig(str(path)), TaskConfig("addition", {"held_out": 2}), str(tmp_path / "run"))
    save(config)
    damage(next(path.glob("model-00002-of-*")), path / "model.safetensors.index.json")
    capsys.readouterr()  # transformers shows how far it is
    for command in (["export", str(path), str(tmp_path / "out")], ["eval", str(path)], ["eval", str(tmp_path / "run")]):
        assert cli.main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(says, line)
        assert line.startswith(f"inflight {command[0]}: {path}")
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_no_checkpoint_has_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.checkpoint_dtype='int8' is not allowed: float32, bfloat16"):
        dataclasses.replace(TrainerConfig(), checkpoint_dtype="int8")
