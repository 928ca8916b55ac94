"""A model with code of its own, as the trainer and the actor load it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from inflight.models.remote_code import RemoteCodeError, require_code
from inflight.prompts import ModelTokens
from inflight.trainer.policy import load_policy

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def directory(tmp_path, tiny_model, monkeypatch):
    """The tiny model under a type that transformers does not have."""
    folder = tmp_path / "own"
    shutil.copytree(tiny_model, folder)
    for name, code in (("configuration", CONFIGURATION), ("modeling", MODEL), ("tokenization", TOKENIZER)):
        (folder / f"{name}_own.py").write_text(code)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    _edit(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=own)
    named = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    _edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=named)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def _edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_it_is_run_where_it_is_trusted_and_computes_as_before(directory, tiny_model):
    require_code("own", directory, trusted=True)
    cpu, ids = torch.device("cpu"), torch.tensor([[3, 4, 5]])
    own = load_policy(directory, bfloat16=False, device=cpu, trust_remote_code=True).master
    assert type(own).__name__ == "OwnForCausalLM"
    plain = load_policy(tiny_model, bfloat16=False, device=cpu).master
    assert torch.equal(own(ids).logits, plain(ids).logits)
    tokens = ModelTokens(str(directory), trust_remote_code=True)
    assert tokens.decode(list(tokens.encode("1+2="))) == "1+2="


@pytest.mark.parametrize("needs", ["config.json", "tokenizer_config.json"])
def test_without_trust_it_is_refused_and_nothing_of_it_runs(directory, tiny_model, needs):
    for file in {"config.json", "tokenizer_config.json"} - {needs}:
        shutil.copyfile(tiny_model / file, directory / file)
    for path in directory.glob("*_own.py"):
        path.write_text("raise SystemExit('was run')")
    with pytest.raises(RemoteCodeError, match=rf"needs code of its own, .*\({needs}\)"):
        require_code("own", directory, trusted=False)
    with pytest.raises(ValueError):
        load_policy(directory, bfloat16=False, device=torch.device("cpu")) if needs == "config.json" else ModelTokens(
            str(directory)
        )
