"""An engine on CPU with vLLM's RayExecutorV2, its ranks on two nodes of a cluster (not a test file).

vLLM refuses Ray on CPU because Ray has no name for such devices, and inflight refuses this executor. Both checks are
passed over here: what is left is to show that a commit takes its place among the steps, on all ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
import torch
from swap_engine import (
    PROMPTS,
    Answer,
    answer,
    greedy,
    greedy_params,
    perturbed,
    reference_logprobs,
    stage,
    start,
    stop,
    swap,
    two_model_logprobs,
    weights_file,
)

import vllm.v1.executor.ray_executor_v2 as executor_v2  # isort: skip - after swap_engine, which prepares its import
from ray.util.state import list_actors
from vllm.platforms import current_platform

from inflight.generator.shadow import limits
from inflight.models import prepare

RANK = "rank"
"""A resource of Ray's in place of GPUs."""

type(current_platform).ray_device_key = RANK
limits.LIMITS = tuple(limit for limit in limits.LIMITS if "Ray" not in limit.what)


class RankProcess(executor_v2.RayWorkerProc):
    """A rank without an accelerator."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]


executor_v2.RayWorkerProc = RankProcess


class Executor(executor_v2.RayExecutorV2):
    """As vLLM has it, with the ranks above, in this process and in theirs."""


def main(address: str, folder: str) -> None:
    """Raises AssertionError when an answer is not that of its version's weights."""
    os.environ["RAY_ADDRESS"] = address
    a = prepare("tiny")
    b = perturbed(a, Path(folder) / "b", seed=1)
    engine = start(a, tensor_parallel_size=2, distributed_executor_backend=Executor)
    try:
        nodes = {each.node_id for each in list_actors(filters=[("state", "=", "ALIVE")])}
        assert len(nodes) == 2, nodes
        whole_answers(engine, (b, a))
        answers_across_a_commit(engine, a, b)
    finally:
        stop(engine)
        ray.shutdown()


def whole_answers(engine: Any, models: tuple[Path, ...]) -> None:
    """Versions 1, 2, …, one after the other."""
    for version, model in enumerate(models, start=1):
        swap(engine, weights_file(model), version)
        for prompt, found in zip(PROMPTS, greedy(engine), strict=True):
            assert found.versions == ((0, version),)
            require_close(found, reference_logprobs(model, prompt, found.tokens))


def answers_across_a_commit(engine: Any, a: Path, b: Path) -> None:
    """Version 3 comes while sequences of version 2 are computed: a rank that swaps a step early or late would change a
    token's log-probability."""
    core = engine.llm_engine
    for index, prompt in enumerate(PROMPTS):
        core.add_request(str(index), {"prompt_token_ids": prompt}, greedy_params())
    core.step()
    stage(engine, weights_file(b), 3)
    for _ in range(4):
        core.step()
    assert core.get_num_unfinished_requests() == len(PROMPTS)
    core.commit_weights(3)
    finished = {}
    while core.has_unfinished_requests():
        finished.update({output.request_id: output for output in core.step() if output.finished})
    for index, prompt in enumerate(PROMPTS):
        found = answer(finished[str(index)])
        (_, before), (first, after) = found.versions
        assert (before, after) == (2, 3)
        require_close(found, two_model_logprobs(a, b, prompt, found.tokens, first))


def require_close(found: Answer, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)
