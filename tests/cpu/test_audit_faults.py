"""A real engine that swaps all the time: the audit confirms every token, and finds each fault planted in the engine.

One engine in this process serves all tests. Its KV cache is too small for what it is asked, prompts are longer than a
step takes and share blocks, so preemption, chunked prefill over swaps and prefix hits all occur.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
from swap_engine import weights_file

from bench.faulty_engine import Fault, FaultyEngine, late_tags, shared_prefix, torn_swap
from inflight.audit import AuditReport
from inflight.audit.evidence import MIN_PROMPTS, Verdict
from inflight.config import AuditConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig
from inflight.generator.engine_args import CPU_WORKER

pytestmark = pytest.mark.vllm

BLOCK = 32
BLOCKS = 11  # one is vLLM's null block; four sequences of full length need 16
TOKENS = 56
SHARED = [3 + (7 * n) % 14 for n in range(36)]
TOLERANCE = 1e-4
TEMPERATURE = 0.8


def requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin alike, each with the number of tokens to sample."""
    source = random.Random(count)
    return [
        (SHARED + [source.randrange(3, 17) for _ in range(source.randrange(1, 24))], TOKENS - 5 * (number % 3))
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyEngine]:
    arguments = {
        "model": str(tiny_model),
        "dtype": "float32",
        "enforce_eager": True,
        "worker_cls": CPU_WORKER,
        "max_model_len": BLOCK * 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.05,  # of this machine's memory: other tests may hold most of it
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "additional_config": {"inflight": {}},
    }
    config = RunConfig(
        model=ModelConfig(name=str(tiny_model), dtype="float32"),
        task=TaskConfig(name="addition"),
        run_dir=str(tmp_path_factory.mktemp("engine") / "run"),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        audit=AuditConfig(keep_versions=True),
    )
    base = load_file(weights_file(tiny_model))

    def weights(version: int) -> dict[str, torch.Tensor]:
        """Every weight moved by a seeded amount."""
        noise = torch.Generator().manual_seed(version)
        return {n: t + 0.05 * torch.randn(t.shape, generator=noise) for n, t in base.items()} if version else base

    engine = FaultyEngine(config, arguments, weights)
    yield engine
    engine.close()


def test_every_token_of_sixty_swaps_is_confirmed(engine: FaultyEngine) -> None:
    outputs = engine.serve(requests(10), every=2)
    assert engine.version >= 60
    report = engine.audit(outputs)
    print(
        f"\n{engine.version} swaps, {report.swaps} changes within sequences, largest difference {report.total.max:.2e}"
    )
    assert report.passed, report.faults
    assert report.rollouts == 10
    assert report.total.max < TOLERANCE
    assert not report.unchecked
    assert report.swaps >= 200
    assert report.straddling_tokens == report.total.tokens
    events = [event for output in outputs for event in output.outputs[0].prefill_versions]
    assert any(event[0] > 0 for event in events), "no request was preempted"
    assert any(event[1] > 0 for event in events), "no prefill saw a swap between its chunks"
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 0, "no prefix was reused"


def test_it_is_confirmed_token_by_token_too(engine: FaultyEngine) -> None:
    report = engine.audit(engine.serve(requests(4), every=3), token_by_token=True)
    assert report.passed, report.faults


def accuse(engine: FaultyEngine, fault: Fault, count: int = 6, **options: Any) -> AuditReport:
    """What the audit says of a batch served with the fault; the engine is whole again afterwards."""
    report = engine.audit(engine.serve_with(fault, requests(count), every=4), **options)
    print(f"\nlargest difference {report.total.max:.2e}")
    assert not report.passed
    assert report.total.max > 10 * TOLERANCE
    return report


def test_fault_a_tags_that_are_a_step_late(engine: FaultyEngine) -> None:
    report = accuse(engine, late_tags(engine), 3 * MIN_PROMPTS, alternatives="early,late")
    print(*(f"{hypothesis.name} {hypothesis.overall}" for hypothesis in report.hypotheses))
    verdicts = {hypothesis.name: hypothesis.overall.verdict for hypothesis in report.hypotheses}
    assert verdicts["early"] is Verdict.ALTERNATIVE, "swaps took effect earlier than the tags say"
    assert verdicts["late"] is not Verdict.ALTERNATIVE


def test_fault_b_a_swap_that_leaves_a_layer_old(engine: FaultyEngine) -> None:
    accuse(engine, torn_swap(engine, "layers.1.mlp.down_proj"))


def test_fault_c_a_stale_output_layer(engine: FaultyEngine) -> None:
    accuse(engine, torn_swap(engine, "lm_head"))


def test_fault_d_a_prefix_hit_across_versions(engine: FaultyEngine) -> None:
    assert not accuse(engine, shared_prefix(engine)).contradictions


def test_the_engine_is_whole_after_all_this(engine: FaultyEngine) -> None:
    report = engine.audit(engine.serve(requests(4), every=4))
    assert report.passed, report.faults
