"""A real engine that swaps all the time: the audit confirms every token, and finds each fault planted in the engine.

One engine in this process serves all tests. Its KV cache is too small for what it is asked, prompts are longer than a
step takes and share blocks, so preemption, chunked prefill over swaps and prefix hits all occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
from swap_engine import WORKER, weights_file  # sets vLLM's environment before anything of it is imported

from inflight.audit import AuditReport, run
from inflight.audit.evidence import MIN_PROMPTS, Verdict
from inflight.config import AuditConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig, save
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.types import PrefillSpan, Rollout, RolloutGroup, Turn, VersionSpan

pytestmark = pytest.mark.vllm

BLOCK = 32
BLOCKS = 11  # one is vLLM's null block; four sequences of full length need 16
TOKENS = 56
SHARED = [3 + (7 * n) % 14 for n in range(36)]
TOLERANCE = 1e-4
TEMPERATURE = 0.8


class Engine:
    """Serves batches of requests while versions are committed, and audits what it recorded."""

    def __init__(self, model: Path, folder: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            str(model),
            dtype="float32",
            enforce_eager=True,
            worker_cls=WORKER,
            max_model_len=BLOCK * 4,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.05,  # of this machine's memory: other tests may hold most of it
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            additional_config={"inflight": {}},
        )
        self.model, self.folder = model, folder
        self.llm = LLMEngine.from_engine_args(arguments)
        self.core = self.llm.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.version = 0
        self._base = load_file(weights_file(model))
        self._batches = 0
        (folder / "versions").mkdir()
        save_file(self._base, self._path())

    def _path(self) -> Path:
        return self.folder / "versions" / f"{self.version:06d}.safetensors"

    def commit(self) -> None:
        """The next version: every weight moved by a seeded amount."""
        self.version += 1
        noise = torch.Generator().manual_seed(self.version)
        moved = {n: t + 0.05 * torch.randn(t.shape, generator=noise) for n, t in self._base.items()}
        save_file(moved, self._path())
        self.llm.collective_rpc("stage_weights", args=(str(self._path()), self.version))
        self.llm.commit_weights(self.version)

    def serve(self, requests: int, every: int) -> list[Any]:
        """Outputs of `requests` requests; a version is committed every `every` steps."""
        from vllm import SamplingParams

        self._batches += 1
        source = random.Random(self._batches)
        for number in range(requests):
            prompt = SHARED + [source.randrange(3, 17) for _ in range(source.randrange(1, 24))]
            sampling = SamplingParams(
                max_tokens=TOKENS - 5 * (number % 3), temperature=TEMPERATURE, logprobs=0,
                ignore_eos=True, detokenize=False,
            )  # fmt: skip
            self.llm.add_request(f"b{self._batches}-{number}", {"prompt_token_ids": prompt}, sampling)
        outputs, steps = [], 0
        while self.llm.has_unfinished_requests():
            outputs += [output for output in self.llm.step() if output.finished]
            steps += 1
            if steps % every == 0:
                self.commit()
        return outputs

    def audit(self, outputs: list[Any], **options: Any) -> AuditReport:
        """A run folder of these outputs, audited."""
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
        return run(folder, **options)


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
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tiny_model, tmp_path_factory.mktemp("engine"))
    yield engine
    engine.llm.engine_core.shutdown()


def test_every_token_of_sixty_swaps_is_confirmed(engine: Engine) -> None:
    outputs = engine.serve(10, every=2)
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


def test_it_is_confirmed_token_by_token_too(engine: Engine) -> None:
    report = engine.audit(engine.serve(4, every=3), token_by_token=True)
    assert report.passed, report.faults


def accuse(
    engine: Engine, plant: Callable[[pytest.MonkeyPatch], None], requests: int = 6, **options: Any
) -> AuditReport:
    """What the audit says of a batch served with the fault; the engine is whole again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        outputs = engine.serve(requests, every=4)
    engine.commit()
    report = engine.audit(outputs, **options)
    print(f"\nlargest difference {report.total.max:.2e}")
    assert not report.passed
    assert report.total.max > 10 * TOLERANCE
    return report


def bindings_left_out(engine: Engine, fragment: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A swap that forgets the modules with `fragment` in their names."""
    shadow = engine.worker.inflight_shadow
    live = engine.worker.model_runner.model
    skipped = [module for name, module in live.named_modules() if fragment in name]
    places = {id(vars(module)) for module in skipped} | {id(module._parameters) for module in skipped}
    assert skipped

    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = shadow.swap

        def torn() -> float:
            shadow._built = [binding for binding in shadow._built if id(binding[0]) not in places]
            return whole()

        patch.setattr(shadow, "swap", torn)

    return plant


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
    accuse(engine, bindings_left_out(engine, "layers.1.mlp.down_proj"))


def test_fault_c_a_stale_output_layer(engine: Engine) -> None:
    accuse(engine, bindings_left_out(engine, "lm_head"))


def test_fault_d_a_prefix_hit_across_versions(engine: Engine) -> None:
    coordinator = engine.core.scheduler.kv_cache_manager.coordinator
    pools = {id(each.block_pool): each.block_pool for each in coordinator.single_type_managers}

    def plant(patch: pytest.MonkeyPatch) -> None:
        for pool in pools.values():
            patch.setattr(pool, "set_weight_version", lambda version: None)
            patch.setattr(pool, "_has_older_kv", lambda request: False)

    report = accuse(engine, plant)
    assert not report.contradictions


def test_the_engine_is_whole_after_all_this(engine: Engine) -> None:
    report = engine.audit(engine.serve(4, every=4))
    assert report.passed, report.faults
