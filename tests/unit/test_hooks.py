"""A vLLM that changed a function that inflight depends on is refused by name, before an engine starts."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from rollout_samples import make_config

from inflight.generator import hooks
from inflight.generator.declared import Attributes, Sources
from inflight.generator.hooks import HOOKS, HookChanged, changes
from inflight.generator.pass_engine import EngineMissing, PassEngine

(VLLM,) = (Path(path) for path in importlib.util.find_spec("vllm").submodule_search_locations)
FILES = sorted({file for side in HOOKS.values() for hook in side for file in hook.files})


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of those sources of the installed vLLM that are looked at."""
    for file in FILES:
        if (VLLM / file).is_file():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(VLLM / file, tmp_path / file)
    return tmp_path


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("side", list(HOOKS))
def test_the_installed_vllm_has_every_hook(side: hooks.Side) -> None:
    assert changes(VLLM, side) == []
    hooks.require(side)


def test_another_argument_is_named_with_what_is_known(changed: Path) -> None:
    path = changed / "v1/worker/gpu/model_runner.py"
    rewrite(path, "def capture_model(self, *, profile_only: bool = False)", "def capture_model(self, *, sizes: list)")
    assert changes(changed, "cuda") == [
        "v1/worker/gpu/model_runner.py has GPUModelRunner.capture_model(self, *, sizes), "
        "known is (self) or (self, *, profile_only=False)"
    ]
    assert changes(changed, "server") == []


def test_a_function_that_is_gone_is_named(changed: Path) -> None:
    path = changed / "v1/worker/gpu_worker.py"
    rewrite(path, "def compile_or_warm_up_model(self)", "def warm_up(self)")
    (line,) = changes(changed, "cuda")
    assert line == "Worker.compile_or_warm_up_model(self) is in none of v1/worker/gpu_worker.py"


def test_an_attribute_that_is_gone_is_named(changed: Path) -> None:
    path = changed / "lora/model_manager.py"
    path.write_text(path.read_text().replace("_last_slot_layout", "_slots_seen"))
    assert changes(changed, "adapters") == ["lora/model_manager.py: LoRAModelManager has no _last_slot_layout"]
    assert changes(changed, "cpu") == changes(changed, "cuda") == []


def test_a_class_that_is_gone_is_named(changed: Path) -> None:
    rewrite(changed / "v1/worker/gpu/cudagraph_utils.py", "class CudaGraphManager", "class Graphs")
    assert changes(changed, "cuda") == ["class CudaGraphManager is in none of v1/worker/gpu/cudagraph_utils.py"]


@pytest.mark.parametrize(
    "source",
    [
        "    held = 1",
        "    held: int",
        "    def __init__(self): self.held = 1",
        "    def __init__(self): self.held: int = 1",
        "    def begin(self): self.other, self.held = 1, 2",
        "    @property\n    def held(self): return 1",
    ],
)
def test_a_class_may_declare_an_attribute_in_any_way(tmp_path: Path, source: str) -> None:
    found = Attributes("Manager", ("manager.py",), ("held",))
    for text, lines in ((source, []), ("    unlike = 1", ["manager.py: Manager has no held"])):
        (tmp_path / "manager.py").write_text(f"class Manager:\n{text}\n")
        assert found.changes(Sources(tmp_path)) == lines


def test_annotations_are_not_part_of_a_signature(changed: Path) -> None:
    rewrite(
        changed / "v1/worker/gpu_worker.py",
        "def determine_available_memory(self) -> int",
        "def determine_available_memory(self: object) -> float",
    )
    assert changes(changed, "cuda") == []


def test_start_is_refused_with_one_line(changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_loader("vllm", loader=None)
    spec.submodule_search_locations = [str(changed)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    hooks.require("cuda")
    (changed / "v1/worker/gpu/kv_connector.py").unlink()
    with pytest.raises(HookChanged, match=r"supports: KVConnector\.pre_forward.* is in none of") as caught:
        hooks.require("cuda")
    assert "\n" not in str(caught.value)


def test_an_audit_through_the_engine_is_refused_by_a_changed_vllm_too(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_loader("vllm", loader=None)
    spec.submodule_search_locations = [str(changed)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    (changed / "model_executor/layers/quantization/base_config.py").unlink()
    with pytest.raises(
        EngineMissing, match=r"supports: QuantizeMethodBase\.process_weights_after_loading.* is in none"
    ):
        PassEngine(tmp_path, make_config(tmp_path), lengths=[8])


@pytest.mark.parametrize("file", ["entrypoints/common/cli_args.py", "entrypoints/openai/cli_args.py"])
def test_the_server_finds_a_function_where_a_version_keeps_it(
    changed: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in FILES:
        if other.endswith("cli_args.py") and (changed / other).exists():
            (changed / other).unlink()
    (changed / file).parent.mkdir(parents=True, exist_ok=True)
    (changed / file).write_text("def make_arg_parser(parser): ...\n")
    spec = importlib.util.spec_from_loader("vllm", loader=None)
    spec.submodule_search_locations = [str(changed)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert hooks.locate("make_arg_parser") == "vllm." + file.removesuffix(".py").replace("/", ".")
