"""A swap on CPU against a freshly loaded engine and against plain transformers; failures that must not show."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from swap_engine import (
    LENGTH,
    PROMPTS,
    answer,
    greedy,
    greedy_params,
    perturbed,
    reference_logprobs,
    said,
    stage,
    start,
    stop,
    swap,
    two_model_logprobs,
    weights_file,
)

from inflight.models import prepare

pytestmark = pytest.mark.vllm


class Bench:
    """An engine started from A, the directories of A and B, and version numbers that never repeat."""

    def __init__(self, a: Path, b: Path) -> None:
        self.a, self.b = a, b
        fresh = start(b)  # before the other: one that ends takes vLLM's process-wide groups with it
        self.fresh_b = said(greedy(fresh))
        stop(fresh)
        del fresh
        gc.collect()
        self.engine = start(a)
        self._version = 0

    def next(self) -> int:
        self._version += 1
        return self._version

    def swap(self, model: Path) -> None:
        swap(self.engine, weights_file(model), self.next())


@pytest.fixture(scope="module", params=["tiny", "tiny-untied"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    a = prepare(request.param)
    b = perturbed(a, tmp_path_factory.mktemp("models") / "b", seed=1)
    bench = Bench(a, b)
    yield bench
    stop(bench.engine)


def test_a_swap_equals_transformers_with_the_same_weights(bench: Bench) -> None:
    for model in (bench.b, bench.a):
        bench.swap(model)
        for prompt, found in zip(PROMPTS, greedy(bench.engine), strict=True):
            expected = reference_logprobs(model, prompt, found.tokens)
            torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)


def test_a_swap_equals_a_fresh_engine_bit_for_bit(bench: Bench) -> None:
    bench.swap(bench.b)
    assert said(greedy(bench.engine)) == bench.fresh_b


def test_back_and_forth_is_identical(bench: Bench) -> None:
    seen: dict[Path, list[Any]] = {bench.a: [], bench.b: []}
    for model in (bench.a, bench.b) * 2:
        bench.swap(model)
        seen[model].append(said(greedy(bench.engine)))
    assert seen[bench.a][0] == seen[bench.a][1]
    assert seen[bench.b][0] == seen[bench.b][1]
    assert seen[bench.a][0] != seen[bench.b][0]


def test_sequences_continue_across_a_swap_which_falls_between_two_steps(bench: Bench) -> None:
    """After k tokens under A the KV is A's and stays; from token k on all is B's, to 1e-5."""
    bench.swap(bench.a)
    before, k = bench._version, 5
    core = bench.engine.llm_engine
    for index, prompt in enumerate(PROMPTS):
        core.add_request(f"across-{before}-{index}", {"prompt_token_ids": prompt}, greedy_params())
    core.step()
    stage(bench.engine, weights_file(bench.b), bench.next())  # ready long before it is committed
    for _ in range(k - 1):
        core.step()
    assert core.get_num_unfinished_requests() == len(PROMPTS)
    core.commit_weights(before + 1)
    finished = {}
    while core.has_unfinished_requests():
        finished.update({output.request_id: output for output in core.step() if output.finished})
    for index, prompt in enumerate(PROMPTS):
        found = answer(finished[f"across-{before}-{index}"])
        assert len(found.tokens) == LENGTH
        assert found.versions == ((0, before), (k, before + 1))
        expected = two_model_logprobs(bench.a, bench.b, prompt, found.tokens, k)
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(256)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


def halve(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.2.mlp.gate_proj.weight"
    tensors[name] = tensors[name].bfloat16()


def count(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name].to(torch.int32)


FAULTS = [
    (drop, "model.layers.1.self_attn.qkv_proj.weight"),
    (drop_norm, "model.norm.weight"),
    (add, "model.layers.1.self_attn.q_proj.bias"),
    (widen, "model.layers.0.self_attn.v_proj.weight"),
    (shorten, "model.layers.2.mlp.down_proj.weight"),
    (halve, "model.layers.2.mlp.gate_proj.weight"),
    (count, "model.layers.0.input_layernorm.weight"),
]


def refusal(engine: Any, version: int) -> str:
    """Why the only rank does not commit. It answers: raised, it would put the answers of several ranks out of step."""
    (answer,) = engine.collective_rpc("commit_weights", args=(version,))
    return str(answer["error"])


@pytest.mark.parametrize(("fault", "names"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_version_that_does_not_fit_is_refused_by_name_and_live_is_untouched(
    bench: Bench, tmp_path: Path, fault: Any, names: str
) -> None:
    bench.swap(bench.a)
    before = said(greedy(bench.engine))
    tensors = load_file(weights_file(bench.b))
    fault(tensors)
    save_file(tensors, tmp_path / "bad.safetensors", metadata={"format": "pt"})
    version = bench.next()
    with pytest.raises(Exception, match=re.escape(names)):
        stage(bench.engine, tmp_path / "bad.safetensors", version)
    assert f"version {version} is not staged" in refusal(bench.engine, version)
    assert said(greedy(bench.engine)) == before
    bench.swap(bench.b)
    assert said(greedy(bench.engine)) != before


def test_only_the_version_that_is_staged_can_be_committed_and_only_once(bench: Bench) -> None:
    version = bench.next()
    stage(bench.engine, weights_file(bench.a), version)
    assert f"version {version + 1} is not staged" in refusal(bench.engine, version + 1)
    bench.engine.llm_engine.commit_weights(version)
    assert f"version {version} is not staged" in refusal(bench.engine, version)


def test_memory_does_not_grow_over_swaps(bench: Bench) -> None:
    """A leaked set is 2.5 MB or more; 30 of them are far above the bound, what the allocator keeps far below."""
    models = (bench.a, bench.b)
    for index in range(6):
        bench.swap(models[index % 2])
    gc.collect()
    before = psutil.Process().memory_info().rss
    for index in range(30):
        bench.swap(models[index % 2])
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    assert grown < 20 << 20, f"{grown / 2**20:.1f} MiB over 30 swaps"
