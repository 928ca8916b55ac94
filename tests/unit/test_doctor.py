"""`inflight doctor`: each check, and what it says to do."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from inflight import patching
from inflight.cli import main
from inflight.doctor import command, environment, gpus, machine, memory, software
from inflight.doctor.finding import Severity, fail, ok, warn
from inflight.doctor.probe import ProbeError, ask
from inflight.launcher.compose import compose

GIB = 1 << 30
PROBES = """
import json, os, signal, subprocess, sys, time
answer, name, *rest = sys.argv[1:]
if name == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(rest[0] + ".partial", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(file.name, rest[0])
    time.sleep(600)
if name == "crash":
    print("driver: unhappy", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "raise":
    raise RuntimeError("no such device")
open(answer, "w").write("[1]" if name == "list" else json.dumps({"got": rest}))
"""


@pytest.fixture
def probes(tmp_path, monkeypatch):
    (tmp_path / "fake_probes.py").write_text(PROBES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return lambda name, *arguments, timeout_s=60.0: ask(name, arguments, timeout_s=timeout_s, module="fake_probes")


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_probe_answers(probes):
    assert probes("answer", "a", "b") == {"got": ["a", "b"]}


def test_a_probe_that_hangs_is_killed_with_what_it_started(probes, tmp_path):
    noted = tmp_path / "pids"
    for limit_s in (3.0, 30.0):  # the second is for a machine on which Python itself takes so long to start
        with pytest.raises(ProbeError, match=f"no answer within {limit_s:.0f} s"):
            probes("hang", str(noted), timeout_s=limit_s)
        if noted.exists():
            break
    pids = [int(pid) for pid in noted.read_text().split()]
    deadline = time.monotonic() + 30
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("crash", "ended by SIGSEGV: driver: unhappy"),
        ("raise", "ended with code 1: RuntimeError: no such device"),
        ("list", "answered list, not an object"),
    ],
)
def test_a_probe_that_fails_is_one_line(probes, name, told):
    with pytest.raises(ProbeError) as failed:
        probes(name)
    assert str(failed.value) == told


def states(findings) -> list[tuple[Severity, str]]:
    return [(finding.state, finding.name) for finding in findings]


def only(findings):
    (finding,) = findings
    return finding


def test_what_fails_says_what_to_do_and_the_exit_code_says_that_something_does(monkeypatch, capsys):
    monkeypatch.setattr(command, "findings", lambda config: [ok("a", "well"), warn("b", "slow", "hurry")])
    for asked, hint in (
        ([], "whether a model fits"),
        (["--config-name", "tiny"], "data, chat template and rewards are"),
    ):
        assert main(["doctor", *asked]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"nothing on this machine stands against a run; {hint}"), "and not that all is well"
    monkeypatch.setattr(command, "findings", lambda config: [ok("a", "well"), fail("b", "broken \x1b?", "mend it")])
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "a", "well"]
    assert lines[2].strip() == "→ mend it"
    assert lines[-1] == "a run would fail: b"


@pytest.mark.parametrize("arguments", [["--config-name", "nope"], ["--config-name", "tiny", "generator.count=0"]])
def test_a_bad_configuration_is_one_line_and_code_2(arguments, capsys):
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_configured_model_is_counted_as_it_is(tiny_model):
    parameters, finding = memory.model(compose("tiny"))
    assert parameters == sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    assert (finding.state, str(tiny_model) in finding.text) == (Severity.OK, True)


def test_a_model_that_does_not_exist():
    parameters, finding = memory.model(compose("tiny", ["model.name=/nowhere"]))
    assert (parameters, finding.state, "/nowhere" in finding.text) == (None, Severity.FAIL, True)


@pytest.mark.parametrize(("offline", "state"), [("0", Severity.WARN), ("1", Severity.FAIL)])
def test_a_model_that_a_run_would_download(tmp_path, monkeypatch, offline, state):
    """In an empty cache. It is no mistake in the configuration, but where downloads are forbidden a run fails."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    config = compose("tiny", ["model.name=owner/absent", "model.revision=v2"])
    parameters, finding = memory.model(config)
    assert (parameters, finding.state) == (None, state)
    assert "owner/absent" in finding.text
    assert "model.name" not in finding.todo
    assert ("`inflight model owner/absent --revision v2`" in finding.todo) == (state is Severity.WARN)
    assert ("HF_HUB_OFFLINE" in finding.todo) == (state is Severity.FAIL)


def test_bytes_of_a_trainer_and_of_a_generator():
    config = compose("tiny", ["model.dtype=bfloat16", "generator.kv_cache_gib=0.5", "machine=cpu"])
    assert memory.trainer_bytes(1000, config) == 16_000 + 2 * 2_000, "state, twin and send buffer"
    assert memory.generator_bytes(1000, config) == 2 * 2_000 + GIB // 2, "live and shadow"
    host = replace(config, generator=replace(config.generator, swap="host", tensor_parallel_size=2))
    assert memory.generator_bytes(1000, host) == 1_000 + GIB // 2
    exact = replace(config, model=replace(config.model, dtype="float32"))
    assert memory.trainer_bytes(1000, exact) == 16_000 + 4_000, "float32 has no twin"
    sharded = replace(config, trainer=replace(config.trainer, processes=2))
    assert memory.trainer_bytes(1000, sharded) == 8_000 + 2_000, "half the state, and the send buffer"
    assert memory.trainer_bytes(1000, sharded, rank=1) == 8_000


@pytest.mark.parametrize(
    ("free", "state"), [(6.0, Severity.OK), (4.8, Severity.WARN), (4.0, Severity.FAIL), (None, Severity.WARN)]
)
def test_memory_is_compared_with_what_is_free(monkeypatch, free, state):
    monkeypatch.setattr(memory, "available_bytes", lambda: None if free is None else int(free * GIB))
    config = compose("tiny", ["model.dtype=bfloat16", "generator.kv_cache_gib=0.5", "machine=cpu"])
    finding = only(memory.on_cpu(GIB // 12, config))  # 20/12 + 4/12 GiB, KV cache and a GiB for each process: 4.5
    assert (finding.state, "4.5 GiB" in finding.text) == (state, True)
    assert "without activations" in finding.text, "a GPU's estimate has 2 GiB for them"


def test_the_memory_of_this_machine_is_known():
    assert GIB // 4 < memory.available_bytes() < 1 << 50


def test_each_gpu_is_compared_with_its_own_processes(monkeypatch):
    asked = {"0": 100 * GIB, "1": 5 * GIB}
    monkeypatch.setattr(memory, "ask", lambda name, **_: {"free": asked})
    config = compose("tiny", ["model.dtype=bfloat16", "generator.kv_cache_gib=1", "machine=cpu"])
    found = list(memory.on_gpus(GIB, config, ["0", "1"]))
    assert states(found) == [(Severity.OK, "memory of GPU 0"), (Severity.FAIL, "memory of GPU 1")]
    assert "about 22 GiB" in found[0].text, "trainer: 16 + 4, and 2 beside them"
    assert "about 7 GiB" in found[1].text, "generator: 4, KV cache 1, and 2 beside them"
    more = replace(config, generator=replace(config.generator, count=3))
    assert only(memory.on_gpus(GIB, more, ["0", "1"])).state is Severity.FAIL
    sharded = replace(config, trainer=replace(config.trainer, processes=2))
    found = list(memory.on_gpus(GIB, sharded, ["0", "1", "2"]))
    assert [each.text.split(" for ")[0] for each in found] == ["about 12 GiB", "about 10 GiB", "about 7 GiB"]


def test_disk_for_checkpoints_and_versions(tmp_path, monkeypatch):
    overrides = ["trainer.steps=9", "audit.keep_versions=true", "trainer.checkpoint_every=3"]
    config = compose("tiny", [*overrides, f"run_dir={tmp_path}/a/b"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: usage._replace(free=90 * GIB))
    assert " for 1 checkpoint, " in only(memory.on_disk(GIB, compose("tiny", ["audit.keep_versions=false"]))).text
    assert only(memory.on_disk(GIB, config)).text.startswith("about 88 GiB for 4 checkpoints and 10 versions")
    assert only(memory.on_disk(GIB, config)).state is Severity.OK
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: usage._replace(free=80 * GIB))
    assert only(memory.on_disk(GIB, config)).state is Severity.FAIL


@pytest.mark.parametrize("name", ["bus.address", "network.bind"])
def test_a_control_port_that_is_taken_is_named(name):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = min(taken.getsockname()[1], 65532)
        first = port - 1
        config = compose("tiny", [f"{name}=127.0.0.1", f"bus.port={first}"])
        loopback, control = machine.ports(config)
    assert (loopback.state, control.state) == (Severity.OK, Severity.FAIL)
    assert control.text.startswith("127.0.0.1: ")
    assert f"{port} (rollouts): Address already in use" in control.text


def test_control_sockets_that_are_no_ports_need_none():
    assert states(machine.ports(compose("tiny"))) == [(Severity.OK, "loopback")]


def test_limits(monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (64, 64))
    files, processes = machine.limits(None)
    assert (files.state, processes.state) == (Severity.FAIL, Severity.FAIL)
    assert "ulimit -Hn 4096" in files.todo
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (64, resource.RLIM_INFINITY))
    assert [finding.state for finding in machine.limits(compose("tiny"))] == [Severity.OK, Severity.OK]


def test_shared_memory(tmp_path, monkeypatch):
    assert only(machine.shared_memory(tmp_path / "absent")).state is Severity.FAIL
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage._replace(free=64 << 20))
    finding = only(machine.shared_memory(tmp_path))
    assert (finding.state, "--shm-size" in finding.todo) == (Severity.FAIL, True)


def test_cores_that_are_not_there():
    config = compose("tiny", ["launch.affinity.trainer=[9999]"])
    assert only(machine.cores(config)).state is Severity.FAIL


def test_the_environment_is_named_and_its_values_are_not_shown():
    around = {"RANK": "3", "VLLM_API_KEY": "s3cret", "NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1", "HOME": "/x"}
    found = list(environment.variables(around, None, []))
    text = " ".join(finding.text for finding in found)
    assert "not inherited by a run's processes: RANK" in text
    assert "passed on: CUDA_LAUNCH_BLOCKING, NCCL_DEBUG, VLLM_API_KEY" in text
    assert "s3cret" not in text
    assert [finding.state for finding in found] == [Severity.OK, Severity.OK, Severity.WARN]


def test_memory_that_cannot_be_exported():
    around = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    tiny = compose("tiny", ["publish.transport=auto"])
    assert [each.state for each in environment.variables(around, tiny, ["0", "1"])] == [Severity.OK, Severity.WARN]
    ipc = replace(compose("tiny"), publish=replace(compose("tiny").publish, transport="ipc"))
    *_, last = environment.variables(around, ipc, ["0", "1"])
    assert (last.state, last.todo) == (Severity.FAIL, "unset PYTORCH_CUDA_ALLOC_CONF")
    assert len(list(environment.variables(around, ipc, []))) == 1, "without GPUs nothing is exported"


@pytest.mark.parametrize(
    ("around", "state"),
    [({}, Severity.OK), ({"VLLM_PLUGINS": "other"}, Severity.FAIL), ({"VLLM_PLUGINS": "other,inflight"}, Severity.OK)],
)
def test_a_plugin_that_vllm_will_not_load(monkeypatch, around, state):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert only(software.plugin()).state is state


def test_a_vllm_without_the_patch(monkeypatch):
    monkeypatch.setattr(software.patching, "check", lambda: patching.PatchState.PRISTINE)
    monkeypatch.setattr(software, "ask", lambda *_, **__: {"version": "0", "device": "cpu", "seconds": 0.1})
    patch, imported, _ = software.vllm(gpus=2)
    assert (patch.state, patch.todo) == (Severity.FAIL, "`inflight patch apply`")
    assert (imported.state, "extra gpu" in imported.todo) == (Severity.WARN, True)


def test_no_vllm(monkeypatch):
    def missing():
        raise patching.PatchError("no vLLM is installed")

    monkeypatch.setattr(software.patching, "check", missing)
    assert only(software.vllm(0)).state is Severity.FAIL


def broken(name, *_, **__):
    raise ProbeError("no answer within 120 s: NVRM: Xid 79")


def test_a_driver_that_hangs_is_one_finding(monkeypatch):
    monkeypatch.setattr(gpus, "ask", broken)
    assert states(gpus.checked()) == [(Severity.FAIL, "CUDA")]
    monkeypatch.setattr(software, "ask", broken)
    assert states(software.torch()) == [(Severity.FAIL, "torch")]


def device(free: float, peers: list[int], computes: bool = True) -> dict:
    return {"name": "H200", "free": int(free * GIB), "total": 140 * GIB, "peers": peers, "computes": computes}


def test_gpus_peer_access_and_ipc(monkeypatch):
    answers = {
        "cuda": {"devices": [device(139, [1]), device(10, [0]), device(139, [], computes=False)]},
        "ipc": {"failed": {"2": "CudaError: cuIpcOpenMemHandle"}, "devices": 3},
    }
    monkeypatch.setattr(gpus, "ask", lambda name, **_: answers[name])
    assert states(gpus.checked()) == [
        (Severity.OK, "GPU 0"),
        (Severity.WARN, "GPU 1"),
        (Severity.FAIL, "GPU 2"),
        (Severity.WARN, "peer access"),
        (Severity.WARN, "CUDA IPC"),
    ]
    answers["cuda"] = {"devices": [device(139, [])]}
    assert states(gpus.checked()) == [(Severity.OK, "GPU 0"), (Severity.FAIL, "CUDA IPC")], "one GPU has no other way"
    answers["cuda"] = {"devices": [device(139, [1]), device(139, [0])]}
    answers["ipc"] = {"failed": {}, "devices": 2}
    assert {finding.state for finding in gpus.checked()} == {Severity.OK}


def test_a_configuration_that_asks_for_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.listed()[1].state is Severity.OK
    assert states(gpus.required(compose("demo_gpu"))) == [(Severity.FAIL, "GPUs")]
    assert list(gpus.required(compose("tiny"))) == []
