"""Adapters that are swapped under running sequences: tokens as of a fresh engine that loads them from disk, and as PEFT
computes them; the base and the other adapters, their tags and their prefixes as if nothing had happened."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from adapters import start_adapters, write_adapter
from safetensors.torch import load_file, save_file
from swap_engine import LENGTH, PROMPTS, Answer, answer, greedy_params, said, start, stop

from inflight.base_digest import base_digest
from inflight.generator.settings import FIRST_ADAPTER
from inflight.generator.shadow.slots import AdapterUnfit
from inflight.models import prepare
from inflight.types import ParamMeta
from inflight.weights.plan import plan

patch = pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(patch.PATCH_VERSION < 2, reason="needs a newer patch of vLLM: inflight patch apply"),
]

POLICY, OTHER = FIRST_ADAPTER, FIRST_ADAPTER + 1
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
BLOCK = 32
LONG = [3 + position % 11 for position in range(BLOCK + 8)]


def request(adapter: int, path: Path | str = "inflight://") -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter {adapter}", adapter, str(path)) if adapter else None


def greedy(engine: Any, adapter: int, path: Path | str = "inflight://") -> list[Answer]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    made = engine.generate(prompts, greedy_params(), use_tqdm=False, lora_request=request(adapter, path))
    return [answer(output) for output in made]


class Bench:
    """An engine with two adapters that have versions and a slot for one of vLLM's own; adapters `a` and `b` on disk."""

    def __init__(self, folder: Path) -> None:
        self.model = prepare("tiny")
        self.folders = {name: folder / name for name in "abc"}
        ranks = {"a": 8, "b": 16, "c": 4}  # of slots of 16
        self.files = {
            name: write_adapter(self.model, self.folders[name], seed, ranks[name])
            for seed, name in enumerate(ranks, start=1)
        }
        fresh = start(self.model, worker_cls=CPU_WORKER, enable_lora=True, max_loras=3, max_lora_rank=16)
        self.fresh = {
            name: said(greedy(fresh, number, self.folders[name])) for number, name in enumerate("abc", start=1)
        }
        self.base = said(greedy(fresh, 0))
        stop(fresh)
        del fresh
        gc.collect()
        self.engine = start_adapters(self.model, ["policy", "other"], enable_prefix_caching=True, block_size=BLOCK)
        self.core = self.engine.llm_engine
        self.versions = {POLICY: 0, OTHER: 0}

    def stage(self, name: str | Path, adapter: int = POLICY) -> int:
        path = self.files[name] if isinstance(name, str) else name
        version = self.versions[adapter] + 1
        self.engine.collective_rpc("stage_weights", args=(str(path), version, True, adapter))
        return version

    def swap(self, name: str, adapter: int = POLICY) -> int:
        version = self.stage(name, adapter)
        (rank,) = self.core.commit_weights(version, adapter)
        assert "error" not in rank, rank
        self.versions[adapter] = version
        return version

    def cached(self, adapter: int) -> int:
        """How many of LONG's tokens are found in the prefix cache."""
        prompt = [{"prompt_token_ids": LONG}]
        (made,) = self.engine.generate(prompt, greedy_params(2), use_tqdm=False, lora_request=request(adapter))
        return int(made.num_cached_tokens)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("adapters"))
    yield bench
    stop(bench.engine)


def test_before_its_first_version_an_adapter_changes_nothing(bench: Bench) -> None:
    assert said(greedy(bench.engine, POLICY)) == bench.base
    assert said(greedy(bench.engine, OTHER)) == bench.base


def test_a_swap_equals_a_fresh_engine_that_loads_the_adapter_from_disk(bench: Bench) -> None:
    """Ranks differ: what an earlier version has left beyond a smaller rank must be gone."""
    for name in "abcab":
        version = bench.swap(name)
        found = greedy(bench.engine, POLICY)
        assert said(found) == bench.fresh[name]
        assert all(each.versions == ((0, version),) for each in found)
        assert said(greedy(bench.engine, 0)) == bench.base


def test_an_adapter_of_fewer_modules_leaves_the_others_to_the_base(bench: Bench, tmp_path: Path) -> None:
    sent = write_adapter(bench.model, tmp_path / "d", 4, modules=("q_proj", "down_proj"))
    for name in ("a", "b"):  # both slots hold all modules
        bench.swap(name)
    bench.files["d"] = sent
    bench.swap("d")
    found = said(greedy(bench.engine, POLICY))
    assert found == said(greedy(bench.engine, 7, tmp_path / "d"))
    assert found not in (bench.base, bench.fresh["a"], bench.fresh["b"])


def test_swaps_at_every_second_step_beside_the_base_and_another_adapter(bench: Bench) -> None:
    """Each token is what PEFT gives under the version of its tag, on the KV of the versions before it."""
    other = bench.swap("c", OTHER)
    names = {bench.swap("a"): "a"}
    for index, prompt in enumerate(PROMPTS):
        for adapter in (0, POLICY, OTHER):
            name = f"{index}-{adapter}-{bench.versions[POLICY]}"
            bench.core.add_request(name, {"prompt_token_ids": prompt}, greedy_params(), lora_request=request(adapter))
    made: dict[tuple[int, int], Answer] = {}
    step = 0
    while bench.core.has_unfinished_requests():
        if step and step % 2 == 0:
            next_one = "ba"[step // 2 % 2 - 1] if step < 2 * LENGTH else "a"
            names[bench.swap(next_one)] = next_one
        for output in bench.core.step():
            if output.finished:
                index, adapter, _ = map(int, output.request_id.split("-")[:3])
                made[index, adapter] = answer(output)
        step += 1
    replay = Replay(bench.model, bench.folders)
    for index, prompt in enumerate(PROMPTS):
        assert (made[index, 0].tokens, made[index, 0].logprobs) == bench.base[index]
        assert made[index, 0].versions == ((0, 0),)
        assert (made[index, OTHER].tokens, made[index, OTHER].logprobs) == bench.fresh["c"][index]
        assert made[index, OTHER].versions == ((0, other),)
        policy = made[index, POLICY]
        assert len(policy.versions) >= LENGTH // 2
        expected = replay(prompt, policy.tokens, [names[version] for version in versions_of(policy)])
        torch.testing.assert_close(torch.tensor(policy.logprobs), expected, atol=1e-5, rtol=0)


def versions_of(made: Answer) -> list[int]:
    """The version of each token."""
    return [[version for start, version in made.versions if start <= at][-1] for at in range(len(made.tokens))]


class Replay:
    """The adapters `a` and `b` in PEFT, over transformers' own model."""

    def __init__(self, model: Path, folders: dict[str, Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(plain, folders["a"], adapter_name="a")
        self.model.load_adapter(folders["b"], adapter_name="b")

    @torch.no_grad()
    def __call__(self, prompt: list[int], tokens: tuple[int, ...], names: list[str]) -> torch.Tensor:
        """[T] the log-probability of each token, drawn under the adapter of its name on top of the KV so far."""
        fed, cache, found = prompt, None, []
        for token, name in zip(tokens, names, strict=True):
            self.model.set_adapter(name)
            step = self.model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache, fed = step.past_key_values, [token]
            found.append(step.logits[0, -1].log_softmax(-1)[token])
        return torch.stack(found)


def test_a_commit_hides_the_prefixes_of_its_adapter_alone(bench: Bench) -> None:
    bench.swap("a")
    bench.swap("c", OTHER)
    for adapter in (0, POLICY, OTHER):
        bench.cached(adapter)
    assert [bench.cached(adapter) for adapter in (0, POLICY, OTHER)] == [BLOCK] * 3
    bench.swap("b")
    assert [bench.cached(adapter) for adapter in (0, POLICY, OTHER)] == [BLOCK, 0, BLOCK]
    assert bench.cached(POLICY) == BLOCK, "the older block of the same tokens is not found before the newer"
    bench.swap("a", OTHER)
    assert [bench.cached(adapter) for adapter in (0, POLICY, OTHER)] == [BLOCK, BLOCK, 0]


def test_adapters_that_vllm_loads_and_evicts_take_no_slot_of_these(bench: Bench) -> None:
    bench.swap("a")
    bench.swap("c", OTHER)
    for number, name in ((1, "b"), (2, "c"), (3, "a"), (4, "c"), (1, "b")):  # three slots are free for four
        assert said(greedy(bench.engine, number, bench.folders[name])) == bench.fresh[name]
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["a"]
    bench.swap("b")
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["b"]
    assert said(greedy(bench.engine, OTHER)) == bench.fresh["c"]


def test_as_many_adapters_of_vllm_as_it_admits_to_a_step_have_slots(bench: Bench) -> None:
    """Also when none with versions is in that step: those keep their slots."""
    bench.swap("a")
    asked = {f"{number}-{index}": (number, index) for number in range(3) for index in range(len(PROMPTS))}
    for key, (number, index) in asked.items():
        adapter = request(11 + number, bench.folders["abc"[number]])
        prompt = {"prompt_token_ids": PROMPTS[index]}
        bench.core.add_request(f"own-{key}", prompt, greedy_params(), lora_request=adapter)
    made = {}
    while bench.core.has_unfinished_requests():
        made |= {output.request_id[4:7]: answer(output) for output in bench.core.step() if output.finished}
    for key, (number, index) in asked.items():
        assert (made[key].tokens, made[key].logprobs) == bench.fresh["abc"[number]][index]
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["a"]


def test_an_adapter_of_another_base_is_refused_by_name_and_live_is_untouched(bench: Bench) -> None:
    bench.swap("a")
    worker = bench.core.engine_core.engine_core.model_executor.driver_worker.worker
    shadow, base = worker.inflight_adapters[POLICY], base_digest(bench.model)
    assert worker._find_base() == base
    with mock.patch.object(worker.vllm_config.load_config, "load_format", "dummy"):
        assert worker._find_base() == ""
    metas = [
        ParamMeta(name=name, shape=tuple(tensor.shape), dtype="float32")
        for name, tensor in load_file(bench.files["b"]).items()
    ]
    with mock.patch.object(shadow, "base", base):
        shadow.begin(plan(metas, {}, 1 << 20, "none", base=base))
        with pytest.raises(
            AdapterUnfit, match=f"trained on another base, 0{{12}}, than this generator .*: {base[:12]}"
        ):
            shadow.begin(plan(metas, {}, 1 << 20, "none", base="0" * 64))
    with mock.patch.object(shadow, "base", ""), pytest.raises(AdapterUnfit, match="weights that were not read from"):
        shadow.begin(plan(metas, {}, 1 << 20, "none", base="1" * 64))
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["a"]
    bench.swap("b")
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["b"]


Q = "base_model.model.model.layers.1.self_attn.q_proj"


def alone(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{Q}.lora_B.weight"]


def wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"] = torch.zeros(8, 256)


def short(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_B.weight"] = torch.zeros(128, 8)


def deep(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"], tensors[f"{Q}.lora_B.weight"] = torch.zeros(32, 128), torch.zeros(256, 32)


def foreign(tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.9.self_attn.q_proj"
    tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = torch.zeros(8, 128), torch.zeros(256, 8)


def full(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.zeros(128)


def halved(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"].bfloat16()


FAULTS = [
    (alone, f"{Q} has no lora_A and lora_B of one rank"),
    (wide, f"{Q}.lora_A.weight [8, 256] is not of the engine's shape"),
    (short, f"{Q}.lora_B.weight [128, 8] is not of the engine's shape"),
    (deep, f"{Q}.lora_A.weight [32, 128] is not of the engine's shape"),
    (foreign, "no place for base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"),
    (full, "model.norm.weight [128] is no matrix of a LoRA adapter"),
    (halved, f"{Q}.lora_A.weight is torch.bfloat16"),
]


@pytest.mark.parametrize(("fault", "text"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_an_adapter_that_does_not_fit_is_refused_by_name_and_live_is_untouched(
    bench: Bench, tmp_path: Path, fault: Any, text: str
) -> None:
    bench.swap("a")
    tensors = load_file(bench.files["c"]) if fault is deep else load_file(bench.files["a"])
    fault(tensors)
    save_file(tensors, tmp_path / "bad.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=re.escape(text)):
        bench.stage(tmp_path / "bad.safetensors")
    (rank,) = bench.engine.collective_rpc("commit_weights", args=(bench.versions[POLICY] + 1, POLICY))
    assert "is not staged" in rank["error"]
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["a"]
    bench.swap("b")
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["b"]


def test_a_version_is_committed_for_the_adapter_that_it_was_staged_for(bench: Bench) -> None:
    version = bench.stage("b", OTHER)
    for adapter, text in ((POLICY, "is not staged"), (0, "adapter 0 has no versions"), (7, "adapter 7 has no")):
        (rank,) = bench.engine.collective_rpc("commit_weights", args=(version, adapter))
        assert text in rank["error"]
    with pytest.raises(ValueError, match="not greater than the current"):
        bench.core.commit_weights(bench.versions[POLICY], POLICY)
    bench.versions[OTHER] = version
    (rank,) = bench.core.commit_weights(version, OTHER)
    assert "error" not in rank


def test_a_slot_that_vllm_has_given_away_is_noticed(bench: Bench) -> None:
    manager = bench.core.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    version, table = bench.stage("b"), list(manager.lora_index_to_id)
    manager.lora_index_to_id[table.index(POLICY)] = None
    (rank,) = bench.engine.collective_rpc("commit_weights", args=(version, POLICY))
    assert "TornWeights" in rank["error"]
    manager.lora_index_to_id[:] = table
    bench.swap("a")
    assert said(greedy(bench.engine, POLICY)) == bench.fresh["a"]


@pytest.mark.slow
def test_two_ranks_swap_to_what_peft_says(tmp_path: Path) -> None:
    """Ranks are processes: each writes its slices into its slot, and both exchange slots at one step."""
    model, folders = prepare("tiny"), {name: tmp_path / name for name in "ab"}
    files = {name: write_adapter(model, folders[name], seed) for seed, name in enumerate("ab", start=1)}
    engine, replay = start_adapters(model, ["policy"], tensor_parallel_size=2), Replay(model, folders)
    try:
        for version, name in enumerate("abab", start=1):
            engine.collective_rpc("stage_weights", args=(str(files[name]), version, True, POLICY))
            ranks = engine.llm_engine.commit_weights(version, POLICY)
            assert len(ranks) == 2
            assert not any("error" in rank for rank in ranks), ranks
            for prompt, found in zip(PROMPTS, greedy(engine, POLICY), strict=True):
                assert found.versions == ((0, version),)
                expected = replay(prompt, found.tokens, [name] * LENGTH)
                torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)
    finally:
        stop(engine)
