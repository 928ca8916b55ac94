"""The policy that is a LoRA adapter, against PEFT itself: values, gradients, what is sent, checkpoints."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from rollout_samples import make_config
from safetensors.torch import load_file, save_file

from inflight.audit.adapter import AdapterReplayer
from inflight.audit.replay import AuditError, KeptVersions
from inflight.base_digest import base_digest
from inflight.config import ConfigError, ModelConfig, RunConfig, Sampling
from inflight.config.effect import require_effect
from inflight.config.lora import LoraConfig
from inflight.config.pairings import require_sound
from inflight.export import ExportError, export
from inflight.merge import MergeError
from inflight.models import prepare
from inflight.models.weight_files import ADAPTER, ADAPTER_WEIGHTS
from inflight.trainer.adapter import AdapterPolicy, adapter_policy
from inflight.trainer.checkpoint.companions import dtype_of
from inflight.trainer.checkpoint.io import keep_version
from inflight.trainer.checkpoint.snapshot import model_tensors
from inflight.trainer.coordinator import Coordinator
from inflight.trainer.loading import load_model
from inflight.trainer.logprobs import score_tokens
from inflight.trainer.policy import reference
from inflight.trainer.run_policy import policy_of
from inflight.trainer.sharding import source_of

FLOAT, BFLOAT16 = (ModelConfig(name="tiny", dtype=dtype) for dtype in ("float32", "bfloat16"))
CPU = torch.device("cpu")
IDS = torch.tensor([[3, 4, 5, 13, 7, 8], [6, 6, 9, 10, 11, 12]])
BATCH = dataclasses.replace(make_batch(torch.zeros(IDS.shape), [1.0, -1.0]), input_ids=IDS)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def run_of(tmp_path: Path, **lora: Any) -> RunConfig:
    config = make_config(tmp_path)
    settings = LoraConfig(**{"rank": 4, "alpha": 20.0, "rslora": True, **lora})
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, autocast=False, lora=settings))


def moved(policy: AdapterPolicy) -> AdapterPolicy:
    """With a B that is not zero."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, matrix in policy.master.named_parameters():
            if ".lora_B." in name:
                matrix.add_(0.1 * torch.randn(matrix.shape, generator=noise))
    policy.refresh()
    return policy


@pytest.fixture
def trained(tmp_path: Path, tiny_model: Path) -> AdapterPolicy:
    torch.manual_seed(0)  # of A's random values, by which rounding differs
    policy = policy_of(run_of(tmp_path), tiny_model, CPU)
    assert isinstance(policy, AdapterPolicy)
    return moved(policy)


def saved(policy: AdapterPolicy, folder: Path) -> Path:
    folder.mkdir()
    policy.master.save_pretrained(folder, state_dict=model_tensors(policy.master))
    return folder


def peft_of(folder: Path, model: Path, **options: Any) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(model, torch.float32, CPU, attention="eager"), folder, **options)


def another_base(model: Path, folder: Path) -> Path:
    """A copy of a model's directory with one value of one weight changed."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][5, 7] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def scores(model: Any) -> torch.Tensor:
    return score_tokens(model, BATCH, Sampling()).logprobs


def test_a_checkpoint_gives_peft_the_same_values_and_gradients(
    trained: AdapterPolicy, tmp_path: Path, tiny_model: Path
) -> None:
    peft = peft_of(saved(trained, tmp_path / "saved"), tiny_model, is_trainable=True)
    ours, theirs = trained.score(BATCH, Sampling()).logprobs, scores(peft.get_base_model())
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours.sum().backward()
    theirs.sum().backward()
    trained.collect_gradients()
    expected = {name.replace(".default", ""): each.grad for name, each in peft.named_parameters() if each.requires_grad}
    found = {name: each.grad for name, each in trained.master.named_parameters()}
    assert found.keys() == expected.keys()
    assert len(found) == 3 * 7 * 2
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-4, msg=name)


def test_a_new_adapter_changes_nothing_and_the_reference_is_the_base(
    trained: AdapterPolicy, tmp_path: Path, tiny_model: Path
) -> None:
    base = scores(load_model(tiny_model, torch.float32, CPU, attention="eager"))
    new = adapter_policy(run_of(tmp_path), tiny_model, CPU)
    assert torch.equal(new.score(BATCH, Sampling()).logprobs, base)
    assert not torch.allclose(trained.score(BATCH, Sampling()).logprobs, base, atol=1e-3)
    assert torch.equal(trained.score_base(BATCH, Sampling()).logprobs, base)
    trained.score(BATCH, Sampling()).logprobs.sum().backward()  # the adapter is on again, and learns
    assert all(twin.grad is not None for _, twin in trained._pairs)
    config = run_of(tmp_path)
    objective = dataclasses.replace(config.trainer.objective, kl=0.1)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, objective=objective))
    assert reference(config, tiny_model, CPU) is None, "no second model is loaded for it"


def test_only_the_matrices_travel_and_b_is_scaled(trained: AdapterPolicy, tmp_path: Path, tiny_model: Path) -> None:
    matrices = dict(trained.master.named_parameters())
    config = dataclasses.replace(run_of(tmp_path), model=BFLOAT16)
    source = source_of(config, trained.master, Coordinator(None, config))
    assert source.base == base_digest(tiny_model), "the manifest names what they are added to"
    sent = dict(source)
    assert sent.keys() == matrices.keys()
    assert torch.equal(sent[f"{Q}.lora_A.weight"], matrices[f"{Q}.lora_A.weight"])
    b = matrices[f"{Q}.lora_B.weight"]
    assert torch.equal(sent[f"{Q}.lora_B.weight"], b.bfloat16() * 10.0)  # 20 / sqrt(4)
    twin = trained.compute.get_submodule("model.layers.0.self_attn.q_proj").lora_B["default"].weight
    torch.testing.assert_close(twin, b * 10.0)


def test_a_run_resumes_from_the_adapter_of_its_checkpoint(
    trained: AdapterPolicy, tmp_path: Path, tiny_model: Path
) -> None:
    folder = saved(trained, tmp_path / "step-000004")
    config = dataclasses.replace(run_of(tmp_path), checkpoint=str(folder))
    assert config.start_model == "tiny", "generators start from the base"
    again = adapter_policy(config, tiny_model, CPU)
    for (name, one), (_, two) in zip(trained.master.named_parameters(), again.master.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    other = dataclasses.replace(run_of(tmp_path, rank=8), checkpoint=str(folder))
    with pytest.raises(ValueError, match=r"another adapter than trainer\.lora describes: .*lora_A\.weight"):
        adapter_policy(other, tiny_model, CPU)
    fewer = dataclasses.replace(run_of(tmp_path, target_modules=["q_proj"]), checkpoint=str(folder))
    with pytest.raises(ValueError, match="another adapter"):
        adapter_policy(fewer, tiny_model, CPU)
    with pytest.raises(ValueError, match=r"step-000004/.* was trained on another base \(\w{12}\) than .* holds"):
        adapter_policy(config, another_base(tiny_model, tmp_path / "other"), CPU)
    described = json.loads((folder / ADAPTER).read_text())
    assert (described["r"], described["lora_alpha"], described["use_rslora"]) == (4, 20.0, True)


def test_what_can_not_be_swapped_is_refused_by_name(tmp_path: Path, tiny_model: Path) -> None:
    for module in ("embed_tokens", "lm_head", "mlp.experts"):
        with pytest.raises(ConfigError, match=rf"trainer\.lora\.target_modules='{module}'"):
            LoraConfig(rank=4, target_modules=[module])
    with pytest.raises(ConfigError, match="does not fit the model"):
        adapter_policy(run_of(tmp_path, target_modules=["nothing"]), tiny_model, CPU)
    config = run_of(tmp_path)
    for changed, text in (
        ({"checkpoint_dtype": "bfloat16"}, r"trainer\.checkpoint_dtype=bfloat16"),
        ({"gradient_checkpointing": True}, r"trainer\.gradient_checkpointing=True"),
        ({"lora": LoraConfig(rank=4, name="tiny")}, r"trainer\.lora\.name=tiny"),
    ):
        trainer = dataclasses.replace(config.trainer, **changed)
        with pytest.raises(ConfigError, match=text):
            require_sound(dataclasses.replace(config, trainer=trainer, model=FLOAT))
    idle = dataclasses.replace(make_config(tmp_path), chosen=["trainer.lora.alpha"])
    with pytest.raises(ConfigError, match=r"trainer\.lora\.alpha is set and has no effect"):
        require_effect(idle)


def test_without_peft_one_line_says_what_to_install(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'inflight\[lora\]'"):
        adapter_policy(run_of(tmp_path), tiny_model, CPU)


def test_the_audit_replays_over_the_base_as_generators_round_it(tmp_path: Path, tiny_model: Path) -> None:
    kept, settings = KeptVersions(tmp_path), LoraConfig(rank=4)
    replayer = AdapterReplayer(tiny_model, kept, Sampling(), settings, base_dtype=torch.bfloat16)
    found = replayer._model.get_submodule("model.layers.0.self_attn.q_proj.base_layer").weight
    exact = load_file(tiny_model / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, exact.bfloat16().float())
    assert not torch.equal(found, exact)


def test_the_audit_refuses_versions_of_another_base(trained: AdapterPolicy, tmp_path: Path, tiny_model: Path) -> None:
    """Versions that name none, of earlier releases, fit any."""
    config = run_of(tmp_path)
    keep_version(source_of(config, trained.master, Coordinator(None, config)), 3, tmp_path / "000003.safetensors")
    kept, settings, dtype = KeptVersions(tmp_path), LoraConfig(rank=4), torch.float32
    AdapterReplayer(tiny_model, kept, Sampling(), settings, base_dtype=dtype)
    other = another_base(tiny_model, tmp_path / "other")
    with pytest.raises(AuditError, match=r"^.*/000003\.safetensors was trained on another base \(\w{12}\) than .*$"):
        AdapterReplayer(other, kept, Sampling(), settings, base_dtype=dtype)
    save_file(kept.load(3), kept.path(3), metadata={"version": "3"})
    AdapterReplayer(other, kept, Sampling(), settings, base_dtype=dtype)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_export_merges_an_adapter_into_its_base(trained: AdapterPolicy, tmp_path: Path, dtype: str | None) -> None:
    folder = saved(trained, tmp_path / "step-000004")
    export(folder, tmp_path / "merged", dtype, merge=True)
    model = load_model(tmp_path / "merged", torch.float32, CPU, attention="eager")
    expected = trained.score(BATCH, Sampling()).logprobs
    torch.testing.assert_close(scores(model), expected, atol=0.05 if dtype else 1e-5, rtol=0)
    assert dtype_of(tmp_path / "merged") == (dtype or "float32")
    export(folder, tmp_path / "adapter")
    assert torch.equal(scores(peft_of(tmp_path / "adapter", prepare("tiny")).get_base_model()), scores_of_peft(folder))


def scores_of_peft(folder: Path) -> torch.Tensor:
    return scores(peft_of(folder, prepare("tiny")).get_base_model())


def test_export_says_what_it_can_not_do(trained: AdapterPolicy, tmp_path: Path, tiny_model: Path) -> None:
    folder = saved(trained, tmp_path / "step-000004")
    with pytest.raises(ExportError, match="--merge casts"):
        export(folder, tmp_path / "out", "bfloat16")
    with pytest.raises(ExportError, match="holds a whole model"):
        export(tiny_model, tmp_path / "out", merge=True)
    another_base(tiny_model, tmp_path / "other")
    for base, reason in (("gone", "gone"), ("other", "was trained on another base")):
        described = json.loads((folder / ADAPTER).read_text()) | {"base_model_name_or_path": str(tmp_path / base)}
        (folder / ADAPTER).write_text(json.dumps(described))
        with pytest.raises(MergeError, match=reason):
            export(folder, tmp_path / "out", merge=True)
    for damaged in ("{", "[]", "{}"):
        (folder / ADAPTER).write_text(damaged)
        with pytest.raises(MergeError, match=r"^the base of the adapter can't be read from .*adapter_config\.json: "):
            export(folder, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["missing", "more"])
def test_export_merges_no_part_of_an_adapter(trained: AdapterPolicy, tmp_path: Path, how: str) -> None:
    """PEFT would leave a layer without its tensors as it is, and tensors without a layer out."""
    folder = saved(trained, tmp_path / "step-000004")
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    name = min(tensors)
    more = name.replace("layers.0", "layers.9")
    changed = tensors | {more: tensors[name].clone()}
    if how == "missing":
        changed = {each: tensor for each, tensor in tensors.items() if each != name}
    save_file(changed, folder / ADAPTER_WEIGHTS)
    says = f"has no {name}, which" if how == "missing" else f"has {more}, which"
    with pytest.raises(MergeError, match=f"{re.escape(says)} adapter_config.json "):
        export(folder, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
