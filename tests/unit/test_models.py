"""The models that runs start from."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from inflight import models
from inflight.models import ModelError, prepare


@pytest.mark.parametrize(("name", "tied"), [("tiny", True), ("tiny-untied", False)])
def test_tiny_loads_with_its_shape_and_tying(tmp_path, name, tied):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prepare(name, tmp_path))
    assert model.config.tie_word_embeddings is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.config.head_dim == 64
    assert model.config.vocab_size == 17
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}


def test_tiny_is_the_same_whenever_it_is_made(tmp_path):
    import torch

    first = (prepare("tiny", tmp_path / "a") / "model.safetensors").read_bytes()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert (prepare("tiny", tmp_path / "b") / "model.safetensors").read_bytes() == first
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tiny_tokenizer_is_one_token_a_character(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare("tiny", tmp_path))
    text = "12+34=\n5 7"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id]


def test_another_user_of_the_cache_may_read_a_prepared_model(tmp_path):
    model = prepare("tiny", tmp_path)
    assert stat.S_IMODE(model.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in model.iterdir()} == {0o644}


def test_a_prepared_model_is_not_made_again(tmp_path, monkeypatch):
    first = prepare("tiny", tmp_path)
    monkeypatch.setattr(models, "_build_whole", lambda *_: pytest.fail("made twice"))
    assert prepare("tiny", tmp_path) == first


def test_a_cache_that_cant_be_written_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="set INFLIGHT_CACHE") as error:
        prepare("tiny", tmp_path / "file" / "cache")
    assert "\n" not in str(error.value)


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(directory):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setitem(models._BUILDERS, "tiny", ("tiny-x", fail))
    with pytest.raises(RuntimeError, match="disk full"):
        prepare("tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-x.lock"]


ONE_OF_TWO = """
import sys, time
from pathlib import Path
from inflight import models

def build(directory):
    time.sleep(0.3)
    with Path(sys.argv[1], "made").open("a") as made:
        made.write("once;")

models._BUILDERS["tiny"] = ("tiny-x", build)
print(models.prepare("tiny", Path(sys.argv[1])))
"""


def test_two_processes_make_it_once(tmp_path):
    command = [sys.executable, "-c", ONE_OF_TWO, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate(timeout=180)[0].strip() for process in both} == {str(tmp_path / "tiny-x")}
    assert (tmp_path / "made").read_text() == "once;"


KILLED = """
import os, signal, sys
from pathlib import Path
from inflight import models

def build(directory):
    (directory / "config.json").write_text("{")
    if sys.argv[2] == "half":
        os.kill(os.getpid(), signal.SIGKILL)
    (directory / "config.json").write_text("{}")

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "made":
    Path.rename = killed
if sys.argv[2] == "renamed":
    models.shutil.rmtree = killed
models._BUILDERS["tiny"] = ("tiny-x", build)
models.prepare("tiny", Path(sys.argv[1]))
"""


@pytest.mark.parametrize("when", ["half", "made", "renamed"])
def test_after_a_kill_the_model_is_whole_and_nothing_else_is_left(tmp_path, monkeypatch, when):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], timeout=180, check=False)
    assert killed.returncode == -signal.SIGKILL
    found = sorted(path.name for path in tmp_path.iterdir())
    assert ("tiny-x" in found) is (when == "renamed")
    monkeypatch.setitem(models._BUILDERS, "tiny", ("tiny-x", lambda to: (to / "config.json").write_text("{}")))
    assert (prepare("tiny", tmp_path) / "config.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-x", "tiny-x.lock"]


def test_a_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert prepare(str(tmp_path)) == tmp_path.resolve()


def test_a_wrong_name_is_reported_in_one_line(tmp_path):
    unknown = f"neither one of smollm2, tiny, tiny-untied, nor a directory in {os.getcwd()}"
    for name, words in (("gpt9", unknown), ("~no-such-user/a/b", unknown), (str(tmp_path), "no config.json")):
        with pytest.raises(ModelError, match=words) as error:
            prepare(name)
        assert "\n" not in str(error.value)


def test_a_damaged_gguf_is_refused(tmp_path, monkeypatch):
    package = tmp_path / models.GGUF_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match="missing"):
        models.find_gguf()
    (package / models.GGUF_FILE).write_bytes(b"GGUF but not ours")
    with pytest.raises(ModelError, match="sha256"):
        models.find_gguf()


def test_an_absent_gguf_says_what_to_install(monkeypatch):
    monkeypatch.setattr(models, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install"):
        models.find_gguf()
