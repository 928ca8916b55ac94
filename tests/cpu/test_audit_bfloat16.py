"""A bfloat16 engine whose versions differ by less than it rounds: replayed by its own kernels, each fault is found.

The same faults as in test_audit_faults.py; there float32 makes them visible to any implementation.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
from swap_engine import weights_file

from bench.faulty_engine import Fault, FaultyEngine, late_tags, shared_prefix, torn_swap
from inflight.audit import AuditReport
from inflight.audit.evidence import MIN_PROMPTS, Verdict
from inflight.config import AuditConfig, GeneratorConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig
from inflight.generator.engine_args import CPU_WORKER, engine_values
from inflight.generator.pass_engine import ROUNDS_BY_BATCH

pytestmark = pytest.mark.vllm

BLOCK = 32
STEP = 0.003
"""Standard deviation of what a version moves each weight by: half of bfloat16's last place for most weights."""


def requests() -> list[tuple[list[int], int]]:
    """Prompts that share their first block in pairs, twice."""
    source = random.Random(0)
    prompts = [[source.randrange(3, 17) for _ in range(BLOCK + 2 + number % 7)] for number in range(MIN_PROMPTS + 4)]
    return [(prompt, 40 - 5 * (number % 3)) for number, prompt in enumerate(prompts * 2)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyEngine]:
    config = RunConfig(
        model=ModelConfig(name=str(tiny_model), dtype="bfloat16"),
        task=TaskConfig(name="addition"),
        run_dir=str(tmp_path_factory.mktemp("engine") / "run"),
        generator=GeneratorConfig(
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_gib=0.0625,
            extra={"block_size": BLOCK, "gpu_memory_utilization": 0.05},
        ),
        rollout=RolloutConfig(),
        audit=AuditConfig(keep_versions=True),
    )
    base = load_file(weights_file(tiny_model))

    def weights(version: int) -> dict[str, torch.Tensor]:
        """A random walk."""
        noise = torch.Generator().manual_seed(0)
        moved = dict(base)
        for _ in range(version):
            moved = {name: each + STEP * torch.randn(each.shape, generator=noise) for name, each in moved.items()}
        return {name: each.to(torch.bfloat16) for name, each in moved.items()}

    arguments = {**engine_values(config, "g0", CPU_WORKER), "additional_config": {"inflight": {}}}
    engine = FaultyEngine(config, arguments, weights)
    yield engine
    engine.close()


refused: list[str] = []
"""Why the audit does not judge on this CPU, once that is known."""


def record(engine: FaultyEngine, fault: Fault, hypotheses: str) -> AuditReport:
    """What the audit says of a batch; the engine is whole again afterwards."""
    if refused:
        pytest.skip(refused[0])
    outputs = engine.serve_with(fault, requests(), every=30)
    try:
        report = engine.audit_through_engine(outputs, hypotheses)
    except RuntimeError as error:
        if ROUNDS_BY_BATCH in str(error):  # what the audit refuses can't be shown here
            refused.append(ROUNDS_BY_BATCH)
            pytest.skip(ROUNDS_BY_BATCH)
        raise
    assert report.total is not None
    assert report.total.same is not None
    print(
        f"\nalike: {report.total.same.share:.1%}",
        *(f"{hypothesis.name} {hypothesis.overall}" for hypothesis in report.hypotheses),
    )
    return report


def verdict(report: AuditReport, hypothesis: str) -> Verdict:
    """Over all versions."""
    return next(each.overall.verdict for each in report.hypotheses if each.name == hypothesis)


def test_a_sound_engine_comes_out_bit_for_bit_and_each_hypothesis_is_ruled_out(engine: FaultyEngine) -> None:
    report = record(engine, contextlib.nullcontext(), "early,late,old,prefix,head,layer.1")
    assert report.passed, report.faults
    assert report.swaps >= 20
    assert report.total.same.share > 0.9
    assert {hypothesis.overall.verdict for hypothesis in report.hypotheses} == {Verdict.TAGS}


@pytest.mark.parametrize(
    ("hypothesis", "fault"),
    [
        ("early", late_tags),
        ("layer.1", lambda engine: torn_swap(engine, "layers.1.")),
        ("head", lambda engine: torn_swap(engine, "lm_head")),
    ],
    ids=["tags a step late", "torn swap", "stale output layer"],
)
def test_each_fault_is_found_and_named(
    engine: FaultyEngine, hypothesis: str, fault: Callable[[FaultyEngine], Fault]
) -> None:
    report = record(engine, fault(engine), hypothesis)
    assert not report.passed
    assert verdict(report, hypothesis) is Verdict.ALTERNATIVE


def test_a_prefix_hit_across_versions_is_found_in_the_first_tokens(engine: FaultyEngine) -> None:
    report = record(engine, shared_prefix(engine), "none")
    assert any("first tokens" in fault for fault in report.faults), report.faults
