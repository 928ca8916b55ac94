"""SmolLM2 on a GPU, swapping all the time beneath CUDA graphs: the audit confirms every token and finds planted faults.

float32, so that the largest difference decides: the products of the engine take no TF32 (torch's own default, and
Triton's by the variable below), nor do those of the replay, which runs on the GPU too. One engine in this process
serves all tests; preemption, chunked prefill and prefix hits occur. A version is half a gigabyte: few, and deleted.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TRITON_F32_DEFAULT="ieee", VLLM_LOGGING_LEVEL="WARNING")

from safetensors.torch import load_file, save_file

from inflight.audit import AuditReport, run
from inflight.audit.evidence import MIN_PROMPTS, Verdict
from inflight.config import AuditConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig, save
from inflight.generator.engine_args import CUDA_WORKER
from inflight.models import ModelError, prepare
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.types import PrefillSpan, Rollout, RolloutGroup, Turn, VersionSpan

pytestmark = pytest.mark.gpu

BLOCKS = 40  # eight sequences of full length need 56 blocks of 16
BATCH = 8
TOKENS = 56
EVERY = 12
SHARED = [100 + 31 * n for n in range(36)]
TOLERANCE = 1e-3
"""Nats. Rounding alone makes 5.7e-5 (bench/RESULTS.md), the least of the faults 0.4."""
NOISE = 0.05
TEMPERATURE = 0.8


class Engine:
    """Serves batches of requests while versions are committed, and audits what it recorded."""

    def __init__(self, model: Path, folder: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            str(model),
            dtype="float32",
            worker_cls=CUDA_WORKER,
            max_model_len=256,
            max_num_seqs=BATCH,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=BLOCKS,
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.1,
            attention_backend="TRITON_ATTN",
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            additional_config={"inflight": {"swap": "remap"}},
        )
        self.model, self.folder = model, folder
        self.llm = LLMEngine.from_engine_args(arguments)
        self.core = self.llm.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.version = 0
        self._base = {name: each.float().cuda() for name, each in load_file(model / "model.safetensors").items()}
        self._batches = 0
        (folder / "versions").mkdir()
        self._save({name: each.cpu() for name, each in self._base.items()})

    def _save(self, state: dict[str, torch.Tensor]) -> Path:
        path = self.folder / "versions" / f"{self.version:06d}.safetensors"
        save_file(state, path)
        return path

    def commit(self) -> None:
        """The next version: every weight moved by a seeded amount, in proportion to its tensor's spread."""
        self.version += 1
        noise = torch.Generator("cuda").manual_seed(self.version)
        moved = {}
        for name, base in self._base.items():
            change = torch.randn(base.shape, generator=noise, device="cuda")
            moved[name] = (base + NOISE * base.std() * change).cpu()
        self.llm.collective_rpc("stage_weights", args=(str(self._save(moved)), self.version))
        self.llm.commit_weights(self.version)

    def serve(self, requests: int) -> list[Any]:
        """Outputs of `requests` requests; a version is committed every EVERY steps."""
        from vllm import SamplingParams

        self._batches += 1
        source = random.Random(self._batches)
        for number in range(requests):
            prompt = SHARED + [source.randrange(100, 40000) for _ in range(source.randrange(1, 60))]
            sampling = SamplingParams(
                max_tokens=TOKENS - 5 * (number % 3), temperature=TEMPERATURE, logprobs=0,
                ignore_eos=True, detokenize=False,
            )  # fmt: skip
            self.llm.add_request(f"b{self._batches}-{number}", {"prompt_token_ids": prompt}, sampling)
        outputs, steps = [], 0
        while self.llm.has_unfinished_requests():
            outputs += [output for output in self.llm.step() if output.finished]
            steps += 1
            if steps % EVERY == 0:
                self.commit()
        return outputs

    def audit(self, outputs: list[Any], **options: Any) -> AuditReport:
        """A run folder of these outputs, audited. All versions but the live one are deleted then."""
        folder = self.folder / f"run{self._batches}"
        config = RunConfig(
            model=ModelConfig(name=str(self.model), dtype="float32"),
            task=TaskConfig(name="addition"),
            run_dir=str(folder),
            rollout=RolloutConfig(temperature=TEMPERATURE),
            audit=AuditConfig(keep_versions=True),
        )
        save(config)
        (folder / "versions").symlink_to(self.folder / "versions")
        with Writer(folder / ROLLOUTS_FILE) as writer:
            for output in outputs:
                rollout = rollout_of(output)
                writer.append(RolloutGroup(group_id=rollout.group_id, prompt_key="k", rollouts=[rollout]))
        report = run(folder, device="cuda", **{"tolerance": TOLERANCE, **options})
        for path in sorted((self.folder / "versions").iterdir())[:-1]:
            path.unlink()
        return report


def rollout_of(output: Any) -> Rollout:
    """A finished request as an actor would record it."""
    completion = output.outputs[0]
    return Rollout(
        rollout_id=output.request_id, group_id=output.request_id, prompt_ids=list(output.prompt_token_ids),
        turn=Turn(
            token_ids=list(completion.token_ids),
            logprobs=[at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids, strict=True)],
            token_versions=[VersionSpan(*span) for span in completion.token_versions],
            prefill_versions=[PrefillSpan(*event) for event in completion.prefill_versions],
            finish_reason=completion.finish_reason,
        ),
        reward=0.0, generator="g0", started=0.0, finished=0.0, first_token_s=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    try:
        model = prepare("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    engine = Engine(model, tmp_path_factory.mktemp("engine"))
    yield engine
    engine.llm.engine_core.shutdown()


def test_every_token_is_confirmed(engine: Engine) -> None:
    outputs = engine.serve(16)
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


def accuse(
    engine: Engine, plant: Callable[[pytest.MonkeyPatch], None], requests: int = BATCH, **options: Any
) -> AuditReport:
    """What the audit says of a batch served with the fault; the engine is whole again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        outputs = engine.serve(requests)
    engine.commit()
    report = engine.audit(outputs, **options)
    print(f"\nlargest difference {report.total.max:.2e}")
    assert not report.passed
    assert report.total.max > 10 * TOLERANCE
    return report


def test_fault_a_tags_that_are_a_step_late(engine: Engine) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        scheduler = engine.core.scheduler
        stamp, schedule = scheduler.set_weight_version, scheduler.schedule
        waiting: list[int] = []

        def schedule_then_stamp(*args: Any) -> Any:
            output = schedule(*args)
            while waiting:
                stamp(waiting.pop())
            return output

        patch.setattr(scheduler, "set_weight_version", waiting.append)
        patch.setattr(scheduler, "schedule", schedule_then_stamp)

    report = accuse(engine, plant, requests=MIN_PROMPTS + 4, alternatives="early,late")
    verdicts = {story.name: story.overall.verdict for story in report.stories}
    assert verdicts["early"] is Verdict.ALTERNATIVE, "swaps took effect earlier than the tags say"
    assert verdicts["late"] is not Verdict.ALTERNATIVE


def test_fault_b_a_swap_that_leaves_a_layer_old(engine: Engine) -> None:
    shadow = engine.worker.inflight_shadow
    left = [region for region in shadow._layout.regions if "layers.7.mlp.down_proj" in region.name]
    assert left

    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = shadow.swap

        def torn() -> float:
            for region in left:
                shadow.target()[region.start : region.stop].copy_(shadow.live[region.start : region.stop])
            torch.cuda.synchronize()
            return whole()

        patch.setattr(shadow, "swap", torn)

    accuse(engine, plant)


def test_fault_c_a_stale_output_layer(engine: Engine) -> None:
    model = engine.worker.model_runner.get_model()
    stale = copy.copy(model.lm_head)  # tied: the embedding itself, which has to go on with the times
    stale._parameters = {
        name: None if each is None else torch.nn.Parameter(each.data.clone(), requires_grad=False)
        for name, each in stale._parameters.items()
    }
    accuse(engine, lambda patch: patch.setattr(model, "lm_head", stale))


def test_fault_d_a_prefix_hit_across_versions(engine: Engine) -> None:
    coordinator = engine.core.scheduler.kv_cache_manager.coordinator
    pools = {id(each.block_pool): each.block_pool for each in coordinator.single_type_managers}

    def plant(patch: pytest.MonkeyPatch) -> None:
        for pool in pools.values():
            patch.setattr(pool, "set_weight_version", lambda version: None)
            patch.setattr(pool, "_has_older_kv", lambda request: False)

    report = accuse(engine, plant, requests=2 * BATCH)
    assert not report.contradictions


def test_the_engine_is_whole_after_all_this(engine: Engine) -> None:
    report = engine.audit(engine.serve(BATCH))
    assert report.passed, report.faults
