"""A sharded model from its files: the weights, buffers, scores and gradients of one that was loaded whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_ranks import ADAPTED, WAYS, adapted, measured
from test_trainer_packing import sequences
from transformers import AutoModelForCausalLM

from inflight.config import Sampling
from inflight.models import prepare
from inflight.trainer.loading import load_model
from inflight.trainer.policy import load_policy
from inflight.trainer.shards import WeightFiles, blank_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directories(tiny_model, tmp_path_factory):
    """Tied and untied embeddings, and weights in several files."""
    several = tmp_path_factory.mktemp("models") / "several"
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained(several, max_shard_size="300KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    return [tiny_model, prepare("tiny-untied"), several]


@pytest.fixture(scope="module")
def ranks(directories, tmp_path_factory):
    """What both ranks have found."""
    out = tmp_path_factory.mktemp("ranks")
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent.parent), str(here)])}
    argv = [sys.executable, str(here / "sharded_ranks.py")]
    processes = [
        subprocess.Popen([*argv, str(rank), str(out / "store"), str(out), *map(str, directories)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [each.wait(300) for each in processes] == [0, 0]
    finally:
        for each in processes:
            each.kill()
            each.wait(10)
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("number", range(3), ids=["tied", "untied", "several files"])
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_hold_and_compute_what_one_does(directories, ranks, number, way):
    """A chunk of three draws at a time; `all`: bfloat16, packed rows, layers computed again."""
    directory, settings = directories[number], {"bfloat16": False} | WAYS[way]
    policy = load_policy(directory, device=CPU, **settings)
    whole = [measured(policy, 1 << 27, settings.get("packing", False), 1, rank) for rank in range(2)]
    got = [each[directory.name, way] for each in ranks]
    for name, tensor in whole[0]["weights"].items():
        assert torch.equal(got[0]["weights"][name], tensor), name
    for rank in range(2):
        for name, buffer in whole[0]["buffers"].items():
            assert got[rank]["buffers"][name].dtype == buffer.dtype
            assert torch.equal(got[rank]["buffers"][name], buffer), name
        error = (got[rank]["logprobs"] - whole[rank]["logprobs"]).norm() / whole[rank]["logprobs"].norm()
        assert error < (1e-2 if settings["bfloat16"] else 1e-6)
    # Gradients of both batches are added up on the policy that is whole, and averaged over the ranks.
    for name, gradient in whole[1]["gradients"].items():
        error = (2 * got[0]["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < (3e-2 if settings["bfloat16"] else 1e-5), name
    parameters = sum(each.numel() for each in policy.master.parameters())
    assert max(each["local"] for each in got) <= parameters // 2 + 17 * 128


@pytest.mark.parametrize("way", ADAPTED)
def test_two_ranks_train_the_adapter_that_one_does_over_a_sharded_base(directories, ranks, way, tmp_path):
    """The ranks' gradients are added up; both hold the whole adapter, equal bit for bit, and half of the base."""
    near = 1e-4
    whole = adapted(directories[0], tmp_path, [0, 1], 1, **ADAPTED[way])
    ours, theirs = (each["adapter", way] for each in ranks)
    for step in range(2):
        assert ours["sent"][step].keys() == whole["sent"][step].keys()
        for name, matrix in whole["sent"][step].items():
            assert torch.equal(ours["sent"][step][name], theirs["sent"][step][name]), name
            assert (ours["sent"][step][name] - matrix).norm() <= near * matrix.norm(), name
    b = next(name for name in whole["sent"][0] if ".lora_B." in name)
    assert whole["sent"][0][b].abs().max() > 0
    torch.testing.assert_close(theirs["base"], whole["base"], rtol=near, atol=near)
    assert max(ours["held"], theirs["held"]) <= whole["held"] // 2 + 17 * 128


def test_the_reference_is_sharded_as_well(directories, ranks):
    policy = load_policy(directories[0], bfloat16=False, device=CPU)
    with torch.no_grad():
        whole = policy.score(sequences((9, 2, 6, 1), kept=False), Sampling()).logprobs
    parameters = sum(each.numel() for each in policy.master.parameters())
    for each in ranks:
        torch.testing.assert_close(each["reference"], whole, rtol=1e-5, atol=1e-6)
        assert each["reference local"] <= parameters // 2 + 17 * 128


def test_a_blank_model_has_no_values_and_is_the_same_otherwise(tiny_model):
    blank = blank_model(tiny_model, torch.float32, attention="eager")
    whole = load_model(tiny_model, torch.float32, CPU, attention="eager")
    assert all(each.is_meta for each in blank.parameters())
    assert blank.get_output_embeddings().weight is blank.get_input_embeddings().weight
    assert (blank.config.to_dict(), blank.training) == (whole.config.to_dict(), False)
    assert blank.generation_config.to_dict() == whole.generation_config.to_dict()


def test_only_one_block_is_whole_at_a_time(tiny_model):
    model = blank_model(tiny_model, torch.float32, attention="eager")
    files = WeightFiles(tiny_model, model)
    first, *others = model.base_model.layers
    files.fill(first)
    assert not any(each.is_meta for each in first.parameters())
    assert all(each.is_meta for layer in others for each in layer.parameters())
    assert not files._filled, "nothing of it is kept here"


def test_files_that_do_not_have_a_parameter_or_have_it_in_another_shape(tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    whole = tensors.pop(name)
    model = blank_model(tmp_path / "model", torch.float32, attention="eager")
    save_file(tensors, file, metadata={"format": "pt"})
    assert not WeightFiles(tmp_path / "model", model).cover()
    save_file(tensors | {name: whole[:3].clone()}, file, metadata={"format": "pt"})
    files = WeightFiles(tmp_path / "model", model)
    assert files.cover()
    with pytest.raises(ValueError, match=f"its weights do not have {name}, or in another shape"):
        files.fill(model)
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json can't be read: KeyError\('weight_map'\)"):
        WeightFiles(tmp_path / "model", model)
