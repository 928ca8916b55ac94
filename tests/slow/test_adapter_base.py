"""A real engine takes versions of an adapter of its own base; those of another base it can't be given, which the
publisher says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")

import bench.in_process  # noqa: F401 - before anything of vLLM
from inflight.base_digest import base_digest
from inflight.bus import Link, Listener
from inflight.config import BusConfig, PublishConfig
from inflight.generator.settings import Settings
from inflight.messages import Commit, EngineHello, Enquire
from inflight.peft_layers import matrices_of, with_adapter
from inflight.trainer.loading import load_model
from inflight.weights.adapter import AdapterSource
from inflight.weights.publish.publisher import Publisher, PublishError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BUS = BusConfig(heartbeat_s=0.2, dead_after_s=60.0)
WAIT_S = 120.0


def adapter_of(model: Path) -> nn.Module:
    """A module whose parameters are an adapter's, named as they are sent."""
    import torch

    base = load_model(model, torch.float32, torch.device("cpu"), attention="eager")
    with_adapter(base, 8, [])
    adapter = nn.Module()
    for name, matrix in matrices_of(base):
        place: nn.Module = adapter
        *path, leaf = name.split(".")
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place._modules[part]  # type: ignore[assignment]
        place.register_parameter(leaf, nn.Parameter(matrix.detach().clone()))
    return adapter


def started(model: Path, endpoint: str) -> Any:
    """An engine in this process whose adapter gets its versions from the publisher at `endpoint`."""
    from vllm import LLM

    settings = Settings(adapters=["policy"], endpoint=endpoint, heartbeat_s=0.2, dead_after_s=60.0)
    return LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=16,
        worker_cls="inflight.generator.worker.adapter_cpu.InflightCPUAdapterWorker",
        additional_config=settings.as_additional_config(),
    )


@pytest.mark.parametrize("same", [True, False], ids=["same base", "another base"])
def test_a_generator_takes_adapters_of_its_own_base_alone(tiny_model: Path, bus_endpoint: str, same: bool) -> None:
    digest = base_digest(tiny_model) if same else "0" * 64
    source = AdapterSource(adapter_of(tiny_model), "float32", 1.0, digest)
    with Listener(bus_endpoint, BUS) as listener:
        publisher = Publisher(source, listener, PublishConfig(), version=0, ranks={"g0": 1})
        engine = started(tiny_model, bus_endpoint)
        link = Link(bus_endpoint, "g0.engine", BUS)
        try:
            link.send(EngineHello(generator="g0", world_size=1, url="http://127.0.0.1:1"))
            if same:
                while isinstance(answer := link.receive(WAIT_S), Enquire):
                    pass
                assert isinstance(answer, Commit)
                assert answer.version == 0
            else:
                held = base_digest(tiny_model)[:12]
                reason = f"trained on another base, 000000000000, than this generator has: {held}"
                with pytest.raises(PublishError, match=rf"^what is published can't be taken by g0: .*{reason}$"):
                    publisher.wait_joined(WAIT_S)
        finally:
            engine.llm_engine.engine_core.shutdown()
            link.close()
            publisher.close()
