"""A real vLLM, in this process, that serves while versions are committed, and in which faults can be planted.

For the audit's tests and its bench: each fault is one that an engine could have, put into the live objects of a running
engine for as long as a context lasts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from safetensors.torch import save_file

import bench.in_process  # noqa: F401 - before anything of vLLM
from inflight.audit import AuditReport, run
from inflight.audit.report import read
from inflight.config import RunConfig, save
from inflight.config.folder import AUDIT_FILE
from inflight.metrics import METRICS_FILE
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.types import PrefillSpan, Rollout, RolloutGroup, Turn, VersionSpan

Fault = contextlib.AbstractContextManager[None]


class FaultyEngine:
    """Serves batches of requests while versions are committed, and audits what it recorded."""

    def __init__(
        self, config: RunConfig, arguments: dict[str, Any], weights: Callable[[int], dict[str, torch.Tensor]]
    ) -> None:
        """`arguments` go to vLLM; `weights(version)` are a version's by checkpoint name. The run folder is made."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.config = config
        self._weights = weights
        self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        core: Any = self.llm.engine_core
        self.core = core.engine_core
        self.version = 0
        self.lora_request: Any = None
        """Of the requests that `serve` records; None: they are the base's."""
        self._batches = 0
        config.version_file(0).parent.mkdir(parents=True)
        save_file(weights(0), config.version_file(0))

    @property
    def worker(self) -> Any:
        """The worker of an engine of one rank, which is in this process."""
        return self.core.model_executor.driver_worker.worker

    def commit(self) -> None:
        """The next version."""
        self.version += 1
        path = self.config.version_file(self.version)
        save_file(self._weights(self.version), path)
        self._swap(path, self.version)

    def _swap(self, path: Path, version: int, *adapter: int) -> None:
        self.llm.collective_rpc("stage_weights", args=(str(path), version, True, *adapter))
        self.llm.commit_weights(version, *adapter)  # type: ignore[attr-defined]  # of our patch

    def serve(self, requests: Sequence[tuple[list[int], int]], every: int) -> list[Any]:
        """Outputs of requests (prompt, tokens to sample); a version is committed every `every` steps."""
        from vllm import SamplingParams

        self._batches += 1
        for number, (prompt, tokens) in enumerate(requests):
            sampling = SamplingParams(
                max_tokens=tokens,
                temperature=self.config.rollout.temperature,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
            )
            name = f"b{self._batches}-{number}"
            given = {"prompt_token_ids": prompt}
            self.llm.add_request(name, given, sampling, lora_request=self.lora_request)
        outputs = []
        steps = 0
        while self.llm.has_unfinished_requests():
            outputs += [output for output in self.llm.step() if output.finished]
            steps += 1
            if steps % every == 0:
                self.commit()
        return outputs

    def serve_with(self, fault: Fault, requests: Sequence[tuple[list[int], int]], every: int) -> list[Any]:
        """As `serve`, with the fault; the engine is whole again afterwards."""
        with fault:
            outputs = self.serve(requests, every)
        self.commit()
        return outputs

    def close(self) -> None:
        """Frees what vLLM keeps in globals, so that another engine of this process can start."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def audit(self, outputs: list[Any], **options: Any) -> AuditReport:
        """Records the outputs and audits the run, here."""
        self.record(outputs)
        return run(self.config.path, **options)

    def audit_through_engine(self, outputs: list[Any], alternatives: str) -> AuditReport:
        """Records the outputs and audits the run through the kernels that recorded, in another process: this one has
        an engine already."""
        self.record(outputs)
        audit = [sys.executable, "-m", "inflight.cli", "audit", str(self.config.path), "--through", "engine"]
        command = [*audit, "--alternatives", alternatives]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1, 3):
            raise RuntimeError(f"the audit ended with {done.returncode}: {done.stderr[-2000:]}")
        return read((self.config.path / AUDIT_FILE).read_bytes())

    def record(self, outputs: list[Any]) -> None:
        """Writes the outputs as the run's rollouts, in place of what was there; two are a group."""
        rollouts = [rollout_of(output) for output in outputs]
        write_run(self.config, [rollouts[at : at + 2] for at in range(0, len(rollouts), 2)])


def write_run(config: RunConfig, groups: Sequence[Sequence[Rollout]]) -> None:
    """A run folder with these groups, of two rollouts each, and as many counted; versions are not written.

    A group is named after its first request."""
    save(replace(config, rollout=replace(config.rollout, group_size=2)))
    path = config.path / ROLLOUTS_FILE
    path.unlink(missing_ok=True)
    numbers = [int(members[0].rollout_id.rpartition("-")[2]) for members in groups]
    with Writer(path) as writer:
        for number, members in zip(numbers, groups, strict=True):
            writer.append(RolloutGroup(group_id=f"q{number}", prompt_key="k", rollouts=list(members)))
    counts = {"groups_granted": len(groups), "groups_in_flight": 0, "groups_failed": {}}
    line = {**counts, "questions": numbers}
    (config.path / METRICS_FILE).write_bytes(msgspec.json.encode(line) + b"\n")


def rollout_of(output: Any) -> Rollout:
    """A finished request as an actor would record it."""
    completion = output.outputs[0]
    return Rollout(
        rollout_id=output.request_id,
        group_id=output.request_id,
        prompt_ids=list(output.prompt_token_ids),
        turn=Turn(
            token_ids=list(completion.token_ids),
            logprobs=[at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids, strict=True)],
            token_versions=[VersionSpan(*span) for span in completion.token_versions],
            prefill_versions=[PrefillSpan(*event) for event in completion.prefill_versions],
            finish_reason=completion.finish_reason,
        ),
        reward=0.0,
        generator="g0",
        started=0.0,
        finished=0.0,
        first_token_s=0.0,
    )


@contextlib.contextmanager
def late_tags(engine: FaultyEngine) -> Iterator[None]:
    """A version is stamped one step after it is live: tags are shifted by a token."""
    scheduler = engine.core.scheduler
    stamp = scheduler.set_weight_version
    schedule = scheduler.schedule
    waiting: list[int] = []

    def schedule_then_stamp(*args: Any) -> Any:
        output = schedule(*args)
        while waiting:
            stamp(waiting.pop())
        return output

    with (
        mock.patch.object(scheduler, "set_weight_version", lambda version, *_: waiting.append(version)),
        mock.patch.object(scheduler, "schedule", schedule_then_stamp),
    ):
        yield


@contextlib.contextmanager
def torn_swap(engine: FaultyEngine, fragment: str) -> Iterator[None]:
    """Swaps leave the modules with `fragment` in their names at the version before; the next one brings them there."""
    shadow = engine.worker.inflight_shadow
    live = engine.worker.model_runner.model
    skipped = [module for name, module in live.named_modules() if fragment in name]
    assert skipped, f"no module has {fragment} in its name"
    places = {id(vars(module)) for module in skipped} | {id(module._parameters) for module in skipped}
    whole = shadow.swap

    waiting: list[Any] = []

    def torn() -> float:
        late = [binding for binding in shadow._built if id(binding[0]) in places]
        shadow._built = [binding for binding in shadow._built if id(binding[0]) not in places] + waiting
        waiting[:] = late
        seconds: float = whole()
        return seconds

    with mock.patch.object(shadow, "swap", torn):
        yield


@contextlib.contextmanager
def shared_prefix(engine: FaultyEngine) -> Iterator[None]:
    """The prefix cache does not hear of new versions: a prompt finds the KV of an older one."""
    coordinator = engine.core.scheduler.kv_cache_manager.coordinator
    pools = {id(each.block_pool): each.block_pool for each in coordinator.single_type_managers}
    with contextlib.ExitStack() as stack:
        for pool in pools.values():
            stack.enter_context(mock.patch.object(pool, "set_weight_version"))
            stack.enter_context(mock.patch.object(pool, "_has_older_kv", return_value=False))
        yield
