"""From a run's configuration to vLLM's arguments, and what is refused before vLLM is imported."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inflight import config as configuration
from inflight.config import ConfigError, GeneratorConfig, ModelConfig, RunConfig, TaskConfig
from inflight.config.lora import LoraConfig
from inflight.generator import engine_args, hooks, patched
from inflight.generator.engine_args import (
    CPU_ADAPTER_WORKER,
    CPU_WORKER,
    CUDA_ADAPTER_WORKER,
    CUDA_WORKER,
    OWN,
    engine_values,
    environment,
    server_arguments,
    worker_of,
)
from inflight.generator.served_adapters import add_adapters
from inflight.generator.settings import FIRST_ADAPTER, NO_VERSION, Settings


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def config(model: str, **generator: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(model),
        task=TaskConfig("addition"),
        run_dir="/r",
        seed=7,
        generator=GeneratorConfig(**generator),
    )


def parser() -> argparse.ArgumentParser:
    """A stand-in with the arguments that this vLLM has."""
    known = argparse.ArgumentParser()
    for name in [*engine_values(config("tiny"), "g0", CPU_WORKER), "host", "uvicorn_log_level", "block_size"]:
        known.add_argument(f"--{name.replace('_', '-')}")
    known.add_argument("--disable-uvicorn-access-log", action="store_true")
    return known


def test_values_follow_the_configuration(model: str) -> None:
    values = engine_values(config(model, kv_cache_gib=0.25, tensor_parallel_size=2), "g0", CPU_WORKER)
    assert (values["model"], values["dtype"], values["seed"]) == (model, "bfloat16", 7)
    assert values["kv_cache_memory_bytes"] == 1 << 28
    assert values["logprobs_mode"] == "processed_logprobs"
    assert values["enforce_eager"] is True
    assert "distributed_executor_backend" not in values
    on_cuda = engine_values(config(model), "g0", CUDA_WORKER)
    assert on_cuda["enforce_eager"] is False
    assert on_cuda["distributed_executor_backend"] == "mp"
    assert on_cuda["gpu_memory_utilization"] < 0.1


def test_the_worker_finds_its_settings(model: str) -> None:
    values = engine_values(config(model, swap="rebind", share_prefix_across_versions=True), "g1", CPU_WORKER)
    found = Settings.of(SimpleNamespace(additional_config=values["additional_config"]))
    assert found == Settings(
        endpoint="ipc:///r/bus/weights",
        generator="g1",
        version=NO_VERSION,
        share_prefix_across_versions=True,
        swap="rebind",
    )


def test_settings_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="colour"):
        Settings.of(SimpleNamespace(additional_config={"inflight": {"colour": "red"}}))
    assert Settings.of(SimpleNamespace(additional_config=None)).endpoint == ""


def test_extra_reaches_vllm_but_not_over_what_inflight_sets(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "prepare", lambda name, revision: Path(name))
    values = engine_values(config(model, extra={"block_size": 32} | dict.fromkeys(OWN, "other")), "g0", CPU_WORKER)
    arguments = server_arguments(parser(), values)
    assert arguments.block_size == 32
    assert arguments.worker_cls == CPU_WORKER
    assert not [name for name in OWN if getattr(arguments, name) == "other"]
    assert values.keys() - OWN.keys() == {"block_size", "enforce_eager", "stream_interval"}, "each has its line"
    assert arguments.host == "127.0.0.1"


def test_an_unknown_extra_is_refused_by_name(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "prepare", lambda name, revision: Path(name))
    values = engine_values(config(model, extra={"blocksize": 32}), "g0", CPU_WORKER)
    with pytest.raises(ConfigError, match=r"generator\.extra\.blocksize is not an argument of this vLLM"):
        server_arguments(parser(), values)


def test_threads_and_silence_are_set_by_environment(model: str) -> None:
    found = environment(config(model, threads=3), {})
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_PLUGINS" not in found


@pytest.mark.parametrize("chosen", ["", "theirs"])
def test_a_users_choice_of_plugins_does_not_leave_out_inflights(model: str, chosen: str) -> None:
    found = environment(config(model), {"VLLM_PLUGINS": chosen})
    assert found["VLLM_PLUGINS"].split(",") == [chosen, engine_args.PLUGIN]


def test_a_vllm_without_the_patch_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"vllm.inflight_patch"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    with pytest.raises(ConfigError, match="run: inflight patch apply"):
        patched.require_patched()
    absent.add("vllm")
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        patched.require_patched()


@pytest.mark.parametrize(("version", "refused"), [(1, True), (2, True), (3, False)])
def test_a_vllm_of_an_older_patch_is_refused(monkeypatch: pytest.MonkeyPatch, version: int, refused: bool) -> None:
    for name, module in {"vllm": ModuleType("vllm"), "vllm.inflight_patch": ModuleType("inflight_patch")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm.inflight_patch"].PATCH_VERSION = version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(hooks, "require", lambda side: None)
    reason = rf"has version {version} of inflight's patch, and 3 is needed: .*patch apply"
    with pytest.raises(ConfigError, match=reason) if refused else nullcontext():
        patched.require_patched()


def test_bad_input_ends_with_one_line(tmp_path: Path, model: str) -> None:
    run = tmp_path / "run"
    configuration.save(
        RunConfig(model=ModelConfig(model), task=TaskConfig("addition"), run_dir=str(run), generator=GeneratorConfig())
    )
    command = [sys.executable, "-m", "inflight.generator", "--run-dir"]
    for arguments, says in (
        ([str(tmp_path / "none"), "--name", "g0"], "is not a run folder"),
        ([str(run), "--name", "g1"], "--name g1 is not one of g0"),
    ):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=180, check=False)
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert says in ended.stderr


def test_an_adapter_changes_worker_slots_and_names(model: str) -> None:
    plain = config(model)
    assert worker_of(plain, cpu=True) == CPU_WORKER
    assert engine_values(plain, "g0", CPU_WORKER)["enable_lora"] is False
    run = dataclasses.replace(plain, trainer=dataclasses.replace(plain.trainer, lora=LoraConfig(rank=12, name="mine")))
    workers = [worker_of(run, cpu=cpu) for cpu in (True, False)]
    assert workers == [CPU_ADAPTER_WORKER, CUDA_ADAPTER_WORKER]
    for worker, eager in zip(workers, (True, False), strict=True):
        values = engine_values(run, "g0", worker)
        found = Settings.of(SimpleNamespace(additional_config=values["additional_config"]))
        assert (found.adapters, found.lineage) == (["mine"], FIRST_ADAPTER)
        assert (values["enable_lora"], values["max_lora_rank"], values["max_loras"]) == (True, 16, 1)
        assert values["enforce_eager"] is eager
    more = dataclasses.replace(run, generator=dataclasses.replace(run.generator, extra={"max_loras": 3}))
    assert engine_values(more, "g0", workers[0])["max_loras"] == 3
    models = SimpleNamespace(lora_requests={}, base_model_paths=[SimpleNamespace(name="base")])
    add_adapters(models, plain)
    assert not models.lora_requests
