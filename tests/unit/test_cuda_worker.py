"""The CUDA worker without a device: which swap it takes, what it tells vLLM's planning, how ranks agree."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu_worker  # noqa: F401 - before there are stand-ins for CUDA's bindings

from inflight.generator.shadow.layout import lay_out
from tests.unit.graphs import Runner

GIB = 2**30


@pytest.fixture
def module(cuda: Any) -> ModuleType:
    return importlib.import_module("inflight.generator.worker.cuda")


@pytest.fixture
def worker(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of a model of 10 GiB, on a device where a second set just fits beside the graphs."""
    made: Any = object.__new__(module.InflightCUDAWorker)
    made.device = torch.device("cpu")
    made.others, made.mappable, made.asked = False, True, []
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    made.requested_memory = 70 * GIB
    made.init_snapshot = SimpleNamespace(free_memory=70 * GIB)
    made.model_runner = SimpleNamespace(model_memory_usage=11 * GIB)
    made.vllm_config = SimpleNamespace(additional_config=None)
    # In use 20, a second set 10, the KV cache 37, MARGIN_BYTES 2, GRAPHS_BYTES 1.
    made.get_kv_cache_spec = lambda: {"layer": SimpleNamespace(max_memory_usage_bytes=lambda _: made.kv)}
    made.kv = 37 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(module.arenas, "supported", lambda _: made.mappable)

    def any_rank(bad: bool, *_: Any) -> bool:
        made.asked.append(bad)
        return bad or made.others

    made._any_rank = any_rank
    return made


@pytest.mark.parametrize(
    ("changes", "taken", "why", "asked"),
    [
        ({}, "graphs", "auto", [False]),
        ({"kv": 37 * GIB + 1}, "remap", "graphs are short of 0.00 GiB", [True]),
        ({"kv": 38 * GIB}, "remap", "graphs are short of 1.00 GiB", [True]),
        ({"kv": 38 * GIB + 1}, "host", "a second set on the device is short of 0.00 GiB", [True]),
        ({"others": True}, "remap", "another rank can't have graphs", [False]),
        ({"mappable": False}, "copy", "no virtual memory management", [True]),
        ({"mappable": False, "kv": 39 * GIB}, "host", "a second set on the device is short of 1.00 GiB", [True]),
    ],
)
def test_auto_takes_the_best_that_fits_and_graphs_on_all_ranks_or_none(
    worker: Any, changes: dict[str, Any], taken: str, why: str, asked: list[bool]
) -> None:
    vars(worker).update(changes)
    assert worker._choose("auto", 10 * GIB) == (taken, why)
    assert worker.asked == asked, "each rank asks, whatever it can have"


def test_a_kv_cache_of_a_fixed_size_is_counted(worker: Any) -> None:
    worker.cache_config.kv_cache_memory_bytes = 37 * GIB
    assert worker._choose("auto", 10 * GIB)[0] == "graphs"
    worker.cache_config.kv_cache_memory_bytes += 1
    assert worker._choose("auto", 10 * GIB)[0] == "remap"


@pytest.mark.parametrize(
    ("asked", "changes", "told"),
    [
        ("graphs", {"kv": 37 * GIB + GIB // 2}, r"with CUDA graphs of 1\.00 GiB .* is short of 0\.50 GiB .*swap=remap"),
        (
            "remap",
            {"kv": 40 * GIB},
            r"second set of 10\.00 GiB on the device and is short of 2\.00 GiB .* use swap=host,",
        ),
        ("copy", {"kv": 40 * GIB}, "is short of 2.00 GiB"),
        ("graphs", {"mappable": False}, "no virtual memory management"),
        ("remap", {"mappable": False}, "no virtual memory management"),
    ],
)
def test_what_is_asked_for_and_cant_be_had_is_refused(
    worker: Any, asked: str, changes: dict[str, Any], told: str
) -> None:
    vars(worker).update(changes)
    with pytest.raises(ValueError, match=told):
        worker._choose(asked, 10 * GIB)
    assert not worker.asked, "settings are the same on all ranks: no rank waits"


@pytest.mark.parametrize(
    ("asked", "kv"), [("graphs", 37 * GIB), ("remap", 38 * GIB), ("copy", 38 * GIB), ("host", 60 * GIB)]
)
def test_what_is_asked_for_and_fits_is_taken(worker: Any, asked: str, kv: int) -> None:
    worker.kv = kv
    assert worker._choose(asked, 10 * GIB) == (asked, "as configured")


@pytest.mark.parametrize(("mode", "usage"), [("graphs", 1), ("remap", 1), ("copy", 21), ("host", 11)])
def test_planning_counts_each_set_once(worker: Any, mode: str, usage: int) -> None:
    worker._account(mode, 10 * GIB)
    assert worker.model_runner.model_memory_usage == usage * GIB


def test_what_is_bad_on_one_rank_is_bad_on_all(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, a thread each, in a real group over the CPU."""
    store, here = torch.distributed.HashStore(), threading.local()
    monkeypatch.setattr(module, "get_world_group", lambda: SimpleNamespace(cpu_group=here.group))

    def heard(rank: int) -> list[bool]:
        here.group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        asked = module.InflightCUDAWorker._any_rank
        return [asked(bad[rank]) for bad in ((False, False), (True, False), (False, True), (True, True))]

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(heard, range(2))) == [[False, True, True, True]] * 2


@pytest.mark.parametrize(("asked", "ends"), [("graphs", True), ("auto", False)])
def test_graphs_that_another_rank_cant_have_end_the_start_where_they_are_asked_for(
    worker: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str, ends: bool
) -> None:
    def arena(nbytes: int, _: Any) -> Any:
        live, other = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        return SimpleNamespace(live=live, shadow=other, add_shadow=lambda: None)

    model: Any = torch.nn.Linear(3, 2).requires_grad_(False)
    model.load_weights = lambda _: None
    worker.model_runner, worker.others = Runner(model, monkeypatch), True
    worker.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
    monkeypatch.setattr(module.arenas, "Arena", arena)
    monkeypatch.setattr(module.Settings, "of", lambda _: SimpleNamespace(swap=asked))
    shadow = worker._build_shadow("graphs", lay_out(model), model)
    shadow.plan_graphs(worker.model_runner)
    assert type(shadow) is module.GraphSetsShadow
    with pytest.raises(ValueError, match=r"swap=graphs: another rank can't") if ends else nullcontext():
        worker.model_runner.capture_model()
    assert worker.asked == [False], "it could have had them"


@pytest.mark.parametrize(("size", "ended"), [(1, []), (2, [1])])
def test_a_rank_that_fails_in_the_middle_of_what_all_do_ends_when_others_wait(
    worker: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch, size: int, ended: list[int]
) -> None:
    def fails(_: Any) -> None:
        raise module.HalfCaptured("no memory")

    codes: list[int] = []
    monkeypatch.setattr(module.Worker, "compile_or_warm_up_model", fails)
    monkeypatch.setattr(module, "get_world_group", lambda: SimpleNamespace(world_size=size))
    monkeypatch.setattr(module.os, "_exit", codes.append)
    with pytest.raises(RuntimeError, match="no memory"):
        worker.compile_or_warm_up_model()
    assert codes == ended


@pytest.fixture
def profiled(worker: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with two sets, at vLLM's measuring: 3 GiB in use, at most 5, 4 left for the KV cache."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(module.Worker, "determine_available_memory", lambda _: 4 * GIB)
    shadow = object.__new__(module.GraphSetsShadow)
    shadow.live, shadow.peak_bytes = torch.zeros(8, dtype=torch.uint8), 0
    shadow.target = lambda: SimpleNamespace(is_cuda=True)
    worker.inflight_shadow, worker.kv = shadow, 4 * GIB
    return worker


def test_what_a_step_takes_is_known_with_a_kv_cache_of_a_fixed_size_too(profiled: Any) -> None:
    assert profiled.determine_available_memory() == 4 * GIB
    assert profiled.inflight_shadow.peak_bytes == 2 * GIB
    profiled.peak_activation_memory = GIB
    profiled.determine_available_memory()
    assert profiled.inflight_shadow.peak_bytes == GIB, "vLLM's own figure, where it has one"


def test_a_cache_that_holds_no_sequence_is_refused(profiled: Any) -> None:
    profiled.kv += GIB
    with pytest.raises(ValueError, match=r"swap=graphs .* is short of 1\.00 GiB"):
        profiled.determine_available_memory()


def test_a_set_in_host_memory_does_not_count_against_the_cache(profiled: Any, module: ModuleType) -> None:
    """The second set is not the cause of a cache that is too small then: vLLM reports it in its own words."""
    profiled.kv += GIB
    profiled.inflight_shadow = object.__new__(module.CopyShadow)
    profiled.inflight_shadow.live = profiled.inflight_shadow._second = torch.zeros(8, dtype=torch.uint8)
    assert profiled.determine_available_memory() == 4 * GIB


def test_the_shadow_that_swaps_is_known_when_vllm_has_started(
    profiled: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    remapping = object.__new__(module.RemapShadow)
    remapping.launch = remapping.used = lambda: None
    profiled.inflight_shadow._tried, profiled.inflight_shadow._sets = True, SimpleNamespace(complete=False)
    profiled.inflight_shadow.fallback = lambda *args, **options: remapping
    profiled.inflight_shadow._arena = profiled.inflight_shadow._layout = None
    profiled.inflight_shadow._load_weights = profiled.inflight_shadow._whole = None
    profiled.model_runner.get_model = lambda: model
    profiled.model_runner._model_forward = lambda: "forward"
    model = SimpleNamespace(compute_logits=lambda: "logits")
    settings = SimpleNamespace(endpoint="")
    monkeypatch.setattr(module.Settings, "of", lambda _: settings)
    monkeypatch.setattr(module.Worker, "compile_or_warm_up_model", lambda _: "times")
    assert profiled.compile_or_warm_up_model() == "times"
    assert profiled.inflight_shadow is remapping
    assert remapping.late


@pytest.mark.parametrize(
    ("transport", "checksum", "warmed"),
    [
        ("nccl", "none", ["NCCL"]),
        ("nccl", "sum64", ["sums", "NCCL"]),
        ("ipc", "sum64", ["sums"]),
        ("ipc", "none", []),
        ("gloo", "crc32", []),
    ],
)
def test_what_a_first_version_would_wait_for_is_done_when_the_rank_joins(
    worker: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch, transport: str, checksum: str, warmed: list[str]
) -> None:
    done: list[str] = []
    communicator = importlib.import_module("inflight.weights.transport.communicator")
    monkeypatch.setattr(
        communicator, "load_kernels", lambda *args: done.append("NCCL" if args == (worker.device, 7.0) else "other")
    )
    monkeypatch.setattr(module, "warm_up", lambda _: done.append("sums"))
    monkeypatch.setattr(
        importlib.import_module("inflight.weights.transport"), "make_receiver", lambda *_: done.append("joined")
    )
    worker.inflight_shadow = SimpleNamespace(agree=lambda _: done.append("planned"), accept=lambda receiver: receiver)
    worker.connect(SimpleNamespace(transport=transport, manifest=SimpleNamespace(checksum=checksum), timeout_s=7.0))
    assert done == ["planned", *warmed, "joined"]
