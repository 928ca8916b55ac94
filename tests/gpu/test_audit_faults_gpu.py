"""SmolLM2 on a GPU, swapping all the time beneath CUDA graphs: the audit confirms every token and finds planted faults.

float32, so that the largest difference decides: the products of the engine take no TF32 (torch's own default, and
Triton's by the variable below), nor do those of the replay, which runs on the GPU too. One engine in this process
serves all tests; preemption, chunked prefill and prefix hits occur. A version is half a gigabyte: few, and deleted.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
os.environ.update(TRITON_F32_DEFAULT="ieee")

from safetensors.torch import load_file

from bench.faulty_engine import Fault, FaultyEngine, late_tags, shared_prefix
from inflight.audit import AuditReport
from inflight.audit.evidence import MIN_PROMPTS, Verdict
from inflight.config import AuditConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig
from inflight.generator.engine_args import CUDA_WORKER
from inflight.models import ModelError, prepare

pytestmark = pytest.mark.gpu

BLOCKS = 40  # eight sequences of full length need 56 blocks of 16
BATCH = 8
TOKENS = 56
EVERY = 12
SHARED = [100 + 31 * n for n in range(36)]
TOLERANCE = 1e-3
"""Nats. Rounding alone makes 5.7e-5 (bench/log/2026-11-28.md), the least of the faults 0.4."""
NOISE = 0.05
TEMPERATURE = 0.8


class Engine(FaultyEngine):
    """Its audits run on the GPU too; all versions but the live one are deleted after each."""

    def audit(self, outputs: list[Any], **options: Any) -> AuditReport:
        report = super().audit(outputs, device="cuda", **{"tolerance": TOLERANCE, **options})
        for path in sorted(self.config.version_file(0).parent.iterdir())[:-1]:
            path.unlink()
        return report


def requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin alike, each with the number of tokens to sample."""
    source = random.Random(count)
    return [
        (SHARED + [source.randrange(100, 40000) for _ in range(source.randrange(1, 60))], TOKENS - 5 * (number % 3))
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    try:
        model = prepare("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "worker_cls": CUDA_WORKER,
        "max_model_len": 256,
        "max_num_seqs": BATCH,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": BLOCKS,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.1,
        "attention_backend": "TRITON_ATTN",
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "additional_config": {"inflight": {"swap": "auto"}},
    }
    config = RunConfig(
        model=ModelConfig(name=str(model), dtype="float32"),
        task=TaskConfig(name="addition"),
        run_dir=str(tmp_path_factory.mktemp("engine") / "run"),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        audit=AuditConfig(keep_versions=True),
    )
    base = {name: each.float().cuda() for name, each in load_file(model / "model.safetensors").items()}

    def weights(version: int) -> dict[str, torch.Tensor]:
        """Every weight moved by a seeded amount, in proportion to its tensor's spread."""
        noise = torch.Generator("cuda").manual_seed(version)
        moved = {}
        for name, each in base.items():
            change = torch.randn(each.shape, generator=noise, device="cuda") if version else torch.zeros_like(each)
            moved[name] = (each + NOISE * each.std() * change).cpu()
        return moved

    engine = Engine(config, arguments, weights)
    yield engine
    engine.close()


def test_every_token_is_confirmed(engine: Engine) -> None:
    outputs = engine.serve(requests(16), EVERY)
    swaps = engine.version
    report = engine.audit(outputs)
    print(
        f"\n{swaps} swaps, {report.swaps} changes within sequences, {report.total.tokens} tokens, "
        f"p50 {report.total.p50:.2e}, largest difference {report.total.max:.2e}"
    )
    assert report.passed, report.faults
    assert report.rollouts == 16
    assert not report.unchecked
    assert report.swaps >= 40
    events = [event for output in outputs for event in output.outputs[0].prefill_versions]
    assert any(event[0] > 0 for event in events), "no request was preempted"
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 0, "no prefix was reused"


def accuse(engine: Engine, fault: Fault, count: int = BATCH, **options: Any) -> AuditReport:
    """What the audit says of a batch served with the fault; the engine is whole again afterwards."""
    report = engine.audit(engine.serve_with(fault, requests(count), EVERY), **options)
    print(f"\nlargest difference {report.total.max:.2e}")
    assert not report.passed
    assert report.total.max > 10 * TOLERANCE
    return report


def test_fault_a_tags_that_are_a_step_late(engine: Engine) -> None:
    report = accuse(engine, late_tags(engine), MIN_PROMPTS + 4, alternatives="early,late")
    verdicts = {hypothesis.name: hypothesis.overall.verdict for hypothesis in report.hypotheses}
    assert verdicts["early"] is Verdict.ALTERNATIVE, "swaps took effect earlier than the tags say"
    assert verdicts["late"] is not Verdict.ALTERNATIVE


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a live object has another value for a while; a module's submodule may be one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def test_fault_b_a_swap_that_leaves_a_layer_old(engine: Engine) -> None:
    shadow = engine.worker.inflight_shadow
    left = [region for region in shadow._layout.regions if "layers.7.mlp.down_proj" in region.name]
    assert left

    whole = shadow.swap

    def torn() -> float:
        for region in left:
            shadow.target()[region.start : region.stop].copy_(shadow.live[region.start : region.stop])
        torch.cuda.synchronize()
        return whole()

    accuse(engine, replaced(shadow, "swap", torn))


def test_fault_c_a_stale_output_layer(engine: Engine) -> None:
    model = engine.worker.model_runner.get_model()
    stale = copy.copy(model.lm_head)  # tied: the embedding itself, which has to follow the versions
    stale._parameters = {
        name: None if each is None else torch.nn.Parameter(each.data.clone(), requires_grad=False)
        for name, each in stale._parameters.items()
    }
    accuse(engine, replaced(model, "lm_head", stale))


def test_fault_d_a_prefix_hit_across_versions(engine: Engine) -> None:
    report = accuse(engine, shared_prefix(engine), 2 * BATCH)
    assert not report.contradictions


def test_the_engine_is_whole_after_all_this(engine: Engine) -> None:
    report = engine.audit(engine.serve(requests(BATCH), EVERY))
    assert report.passed, report.faults
