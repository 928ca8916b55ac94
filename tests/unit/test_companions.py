"""What a checkpoint holds beside the weights, of directories as users have them."""

import dataclasses
import json
import shutil

import pytest
from test_trainer_run import Run, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight.config import ModelConfig
from inflight.trainer.checkpoint.companions import copy_companions, plain_generation

INVALID = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
"""What transformers reads and refuses to write."""
BESIDE = {
    "generation_config.json": json.dumps(INVALID),
    "added_tokens.json": '{"<new>": 16}',
    "spiece.model": "a tokenizer's",
    "modeling_own.py": "raise RuntimeError('never imported')\n",
    "configuration_own.py": "",
    "additional_chat_templates/tools.jinja": "{{ messages }}",
    "preprocessor_config.json": "{}",
}
OTHER_WEIGHTS = ("pytorch_model.bin", "model.safetensors.index.json", "consolidated.00.pth", "tf_model.h5", ".hidden")


@pytest.fixture
def run(tmp_path, tiny_model):
    """A run from a directory with companions."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    for name, text in BESIDE.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder, steps=2, checkpoint_every=1)
    run.config = dataclasses.replace(run.config, model=ModelConfig(name=str(directory), dtype="bfloat16"))
    run.save()
    run.directory = directory
    yield run
    run.close()


def test_a_checkpoint_has_all_companions_as_they_are(run):
    kept = {path.name: path.read_bytes() for path in run.directory.glob("tokenizer*")}
    (run.directory / "merges.txt").symlink_to(run.directory / "tokenizer.json")  # as in a cache of models
    for name in OTHER_WEIGHTS:
        (run.directory / name).write_text("of the start")
    (run.directory / "model.safetensors.index.json").unlink()  # it would be believed
    run.start()
    assert train(run) == 0
    for step in (1, 2):
        folder = run.folder / "checkpoints" / f"step-{step:06d}"
        assert {name: (folder / name).read_text() for name in BESIDE} == BESIDE
        assert {name: (folder / name).read_bytes() for name in kept} == kept
        assert (folder / "merges.txt").is_file()
        assert not (folder / "merges.txt").is_symlink()
        assert not {path.name for path in folder.iterdir()} & set(OTHER_WEIGHTS)
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
        assert AutoModelForCausalLM.from_pretrained(folder).generation_config.temperature == 0.6
        assert AutoTokenizer.from_pretrained(folder)("1+2=")["input_ids"]


def test_end_tokens_of_a_model_without_generation_settings_stay_those_of_its_configuration(tmp_path, tiny_model):
    """vLLM reads generation_config.json first: one that save_pretrained has made up would hide the list."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tiny_model, source)
    (source / "generation_config.json").unlink()
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"eos_token_id": [1, 5]}))
    model = AutoModelForCausalLM.from_pretrained(source)
    with plain_generation(model):
        model.save_pretrained(target)
    copy_companions(source, target)
    assert not (target / "generation_config.json").exists()
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == [1, 5]
