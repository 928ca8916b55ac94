"""A real engine whose adapters change all the time: the audit confirms every token of both that have versions, and
finds each fault planted in the engine.

One engine serves all tests. Its KV cache is too small for what it is asked, prompts are longer than a step takes and
share blocks, and vLLM's own adapters have three slots for four: preemption, chunked prefill over swaps, prefix hits and
evictions of adapters all occur.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")

from bench.faulty_adapters import (
    FaultyAdapters,
    Planted,
    foreign_slot,
    live_slot,
    planted,
    stale_slot,
    wrong_lineage,
)
from bench.faulty_engine import Fault, shared_prefix
from inflight.audit import AuditReport
from inflight.config import AuditConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig
from inflight.config.lora import LoraConfig
from inflight.config.trainer import TrainerConfig
from inflight.models import prepare

pytestmark = pytest.mark.vllm

WORKER = "inflight.generator.worker.adapter_cpu.InflightCPUAdapterWorker"
BLOCK = 32
BLOCKS = 13  # one is vLLM's null block; six sequences of full length need 24
TOKENS = 56
SHARED = [3 + (7 * n) % 14 for n in range(36)]
TOLERANCE = 1e-4
RANK = 8


def requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin alike, each with the number of tokens to sample."""
    source = random.Random(count)
    return [
        (SHARED + [source.randrange(3, 17) for _ in range(source.randrange(1, 24))], TOKENS - 5 * (number % 3))
        for number in range(count)
    ]


def matrices_of(model: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    """Random adapters of all linear layers by their seed, float32, as a publisher sends them; that of seed 0 does
    nothing."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def matrices(seed: int) -> dict[str, torch.Tensor]:
        noise, made = torch.Generator().manual_seed(seed), {}
        for layer in range(config["num_hidden_layers"]):
            for module, (out, into) in shapes.items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                made[f"{name}.lora_A.weight"] = torch.randn(RANK, into, generator=noise) * into**-0.5
                b = 0.1 * torch.randn(out, RANK, generator=noise)
                made[f"{name}.lora_B.weight"] = b if seed else torch.zeros_like(b)
        return made

    return matrices


def saved(matrices: dict[str, torch.Tensor], folder: Path) -> Path:
    """A PEFT directory."""
    folder.mkdir()
    save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in matrices})
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def start(folder: Path, model: Path, dtype: str, arguments: dict[str, Any]) -> FaultyAdapters:
    """An engine of `arguments` with two adapters that have versions, and four that vLLM loads."""
    config = RunConfig(
        model=ModelConfig(name=str(model), dtype=dtype),
        task=TaskConfig(name="addition"),
        run_dir=str(folder / "run"),
        rollout=RolloutConfig(temperature=0.8),
        trainer=TrainerConfig(lora=LoraConfig(rank=RANK)),
        audit=AuditConfig(keep_versions=True),
    )
    wire = getattr(torch, dtype)
    made = matrices_of(model)

    def matrices(seed: int) -> dict[str, torch.Tensor]:
        return {name: tensor.to(wire) for name, tensor in made(seed).items()}

    common = {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": BLOCK * 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }
    own = [saved(matrices((1 << 30) + n), folder / f"own{n}") for n in range(1, 5)]
    return FaultyAdapters(config, {**common, **arguments}, matrices, own)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyAdapters]:
    arguments = {
        "worker_cls": WORKER,
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.05,
        "tensor_parallel_size": request.param,
    }
    engine = start(tmp_path_factory.mktemp("engine"), prepare("tiny"), "float32", arguments)
    yield engine
    engine.close()


def said(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def versions(outputs: list[Any]) -> list[list[tuple[int, int]]]:
    return [[tuple(span) for span in output.outputs[0].token_versions] for output in outputs]


def test_every_token_of_two_adapters_is_confirmed(engine: FaultyAdapters) -> None:
    asked = requests(10)
    alone = engine.company_alone([prompt for prompt, _ in asked[:2]])
    outputs = engine.serve(asked, every=2)
    assert engine.version >= 60
    report = engine.audit(outputs)
    print(f"\n{engine.version} swaps, {report.swaps} within sequences, largest difference {report.total.max:.2e}")
    require_sound(engine, report)
    assert report.rollouts == 10
    assert not report.unchecked
    assert report.swaps >= 200
    events = [event for output in outputs for event in output.outputs[0].prefill_versions]
    assert any(event[0] > 0 for event in events), "no request was preempted"
    assert any(event[1] > 0 for event in events), "no prefill saw a swap between its chunks"
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 0, "no prefix was reused"
    other = engine.audit_other()
    require_sound(engine, other)
    assert 0 < other.swaps < report.swaps / 10
    for kind in ("base", "own"):
        assert versions(engine.company[kind]) == [[(0, 0)]] * len(alone[kind])
        if engine.exact:
            assert said(engine.company[kind]) == said(alone[kind])


def require_sound(engine: FaultyAdapters, report: AuditReport) -> None:
    """No fault was found; in float32 also: none can be there."""
    assert not report.faults
    if engine.exact:
        assert report.passed, report.open
        assert report.total.max < TOLERANCE


def accuse(engine: FaultyAdapters, fault: Fault) -> AuditReport:
    """What the audit says of a batch served with the fault; the engine is whole again afterwards."""
    report = engine.audit(engine.serve_with(fault, requests(6 if engine.exact else 24), every=4))
    print(f"\nlargest difference {report.total.max:.2e}")
    assert report.faults
    assert report.total.max > 1000 * TOLERANCE
    return report


@pytest.mark.parametrize("fault", [foreign_slot, live_slot, stale_slot])
def test_a_wrong_or_stale_slot_is_found(engine: FaultyAdapters, fault: Planted) -> None:
    accuse(engine, planted(engine, fault))


def test_tags_of_another_lineage_are_found(engine: FaultyAdapters) -> None:
    accuse(engine, wrong_lineage(engine))


def test_a_prefix_hit_across_versions_is_found(engine: FaultyAdapters) -> None:
    assert not accuse(engine, shared_prefix(engine)).contradictions


def test_the_engine_is_whole_after_all_this(engine: FaultyAdapters) -> None:
    require_sound(engine, engine.audit(engine.serve(requests(4), every=4)))
    require_sound(engine, engine.audit_other())
