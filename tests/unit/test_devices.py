"""Which GPUs each process of a run sees."""

from __future__ import annotations

import pytest

from inflight.config import ConfigError
from inflight.launcher import devices
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.launcher.devices import assign, available, require_exportable, require_gpu


def run(count: int = 1, ranks: int = 1):
    return compose("tiny", [f"generator.count={count}", f"generator.tensor_parallel_size={ranks}"])


def test_without_gpus_nothing_is_said():
    assert assign(run(), []) == {}


def test_a_single_gpu_is_shared():
    assert assign(run(count=2), ["3"]) == {"trainer": "3", "g0": "3", "g1": "3"}


def test_generators_see_their_own_first_and_then_the_trainers():
    assert assign(run(), ["0", "1"]) == {"trainer": "0", "g0": "1,0"}
    assert assign(run(count=2), ["4", "5", "6", "7"]) == {"trainer": "4", "g0": "5,4", "g1": "6,4"}
    assert assign(run(ranks=2), ["0", "1", "2"]) == {"trainer": "0", "g0": "1,2,0"}


@pytest.mark.parametrize(("value", "seen"), [("", []), ("-1", []), ("0, 1", ["0", "1"]), ("2,-1,3", ["2"])])
def test_visible_devices_are_read_as_cuda_reads_them(monkeypatch, value, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert available() == seen


def test_a_driver_that_hangs_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "QUERY_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES"):
        available()


def test_a_run_for_gpus_needs_one(monkeypatch):
    gpu = compose("tiny", ["machine=gpu"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    require_gpu(gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    require_gpu(run())
    with pytest.raises(ConfigError, match=r"machine=gpu .*no GPU was found, CUDA_VISIBLE_DEVICES='' leaves none"):
        require_gpu(gpu)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="nvidia-smi shows none"):
        require_gpu(gpu)


@pytest.mark.parametrize(
    "asked", ["publish.transport=ipc", "publish.transport=nccl", "generator.swap=graphs", "generator.swap=remap"]
)
def test_what_only_a_gpu_has_is_refused_without_one(monkeypatch, asked):
    config = compose("tiny", [asked])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    require_gpu(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=rf"^{asked} is not allowed: no GPU was found, .*; without one: auto or"):
        require_gpu(config)


@pytest.mark.parametrize("devices", [["0"], ["0", "1"]])
def test_too_few_are_reported(devices):
    with pytest.raises(ConfigError, match="takes 3 GPUs, there are"):
        assign(run(ranks=2), devices)


def test_the_environment_limits_what_is_handed_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert available() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert available() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert available() == []


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_expandable_segments_are_taken_where_nccl_reaches_the_generators(transport):
    require_exportable(compose("tiny", [f"publish.transport={transport}"]), ["0", "1"], EXPANDABLE)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("transport", "there", "says"),
    [
        ("ipc", ["0", "1"], "publish.transport=ipc is not allowed with {}: such memory can't be exported; use nccl"),
        ("auto", ["0"], "{} is not allowed where the trainer shares its GPU with a generator: "),
    ],
)
def test_expandable_segments_are_refused_by_name_where_no_weights_would_arrive(variable, transport, there, says):
    setting = "expandable_segments:True"
    with pytest.raises(ConfigError) as refused:
        require_exportable(compose("tiny", [f"publish.transport={transport}"]), there, {variable: setting})
    assert str(refused.value).startswith(says.format(f"{variable}={setting}"))


@pytest.mark.parametrize(
    ("there", "environment"),
    [([], EXPANDABLE), (["0"], {}), (["0"], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})],
)
def test_other_settings_of_the_allocator_are_no_matter(there, environment):
    require_exportable(compose("tiny", ["publish.transport=auto"]), there, environment)


def test_a_run_is_refused_for_them_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="PYTORCH_ALLOC_CONF=expandable_segments:True is not allowed"):
        usual_commands(compose("tiny", [f"run_dir={tmp_path}/run", "publish.transport=auto"]))
