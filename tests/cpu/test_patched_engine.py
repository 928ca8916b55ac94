"""What the vLLM patch claims, checked against a witness that follows every KV slot by itself.

The witness sees only what is sent to the ranks (block tables, positions) and which version the test committed last.
From that it knows under which version each KV slot was written, and so with which KV each token was sampled. The
claims (`token_versions`, `prefill_versions`) have to tell the same, position by position.

With INFLIGHT_TEST_WITHOUT_MODEL=1 a stand-in for the worker draws the tokens and all else of the engine is real. So the
same tests run on a vLLM whose kernels are not available (test_patches_wheels.py).
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
pytestmark = pytest.mark.vllm

BLOCK = 32
BLOCKS = 8  # one is vLLM's null block; two sequences of full length don't fit
CHUNK = 64

WITHOUT_MODEL = os.environ.get("INFLIGHT_TEST_WITHOUT_MODEL") == "1"

Versions = list[tuple[int, int]]
Prefills = list[tuple[int, int, int]]


class Witness:
    """Follows KV slots through the scheduler outputs that are dispatched."""

    def __init__(self) -> None:
        self.version = 0
        self._slots: dict[tuple[int, int], int] = {}
        self._tables: dict[str, list[int]] = {}
        self._seen: dict[str, dict[int, list[int]]] = {}

    def dispatch(self, output: Any, scheduler: Any) -> set[str]:
        """Writes the step's KV into its slots under the version in force, and notes what each sample attends to.

        Returns the requests that sample in this step.
        """
        sampling = {name for name in output.num_scheduled_tokens if not scheduler.requests[name].is_prefill_chunk}
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            table = [] if name in cached.resumed_req_ids else self._tables[name]
            self._tables[name] = table + list(blocks[0] if blocks else [])
            starts[name] = start
        for name, start in starts.items():
            end = start + output.num_scheduled_tokens[name]
            slots = [(self._tables[name][position // BLOCK], position % BLOCK) for position in range(end)]
            self._slots.update(dict.fromkeys(slots[start:], self.version))
            if name in sampling:
                self._seen.setdefault(_external(name), {})[end] = [self._slots[slot] for slot in slots]
        return sampling

    def kv(self, request: str, prompt: int, tokens: int) -> list[list[int]]:
        """For each output token, the versions of the KV that it was sampled with."""
        return [self._seen[request][prompt + index] for index in range(tokens)]


def claimed_kv(prompt: int, tokens: int, versions: Versions, prefills: Prefills) -> list[list[int]]:
    """The same, from the claims alone; the step that samples a token writes the KV of the one before it."""
    kv: list[int] = []
    result = []
    for index in range(tokens):
        version = [version for start, version in versions if start <= index][-1]
        kv.append(version)
        for _, position, prefill in (event for event in prefills if event[0] == index):
            kv[position:] = [prefill] * (prompt + index - position)
        result.append(kv.copy())
    return result


def _external(name: str) -> str:
    """vLLM adds a random suffix to request names."""
    return name.rsplit("-", 1)[0]


class Lab:
    """An in-process engine, its witness, and the versions that the test committed."""

    def __init__(self, model: Path, **inflight: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=BLOCK * (BLOCKS - 2),
            dtype="float32",
            enforce_eager=True,
            worker_cls=f"{__name__}.make_worker",
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS,
            additional_config={"inflight": inflight},
            distributed_executor_backend=executor_without_model() if WITHOUT_MODEL else None,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.core = self.engine.engine_core.engine_core
        self.witness = Witness()
        self.witness.version = inflight.get("version", 0)
        execute = self.core.model_executor.execute_model

        def witnessed(output: Any, **kwargs: Any) -> Any:
            sampling = self.witness.dispatch(output, self.core.scheduler)
            return _done(_drawn(output, sampling, token=7)) if WITHOUT_MODEL else execute(output, **kwargs)

        self.core.model_executor.execute_model = witnessed
        self._number = 0

    def add(self, prompt: int, tokens: int, first: int = 1, ids: list[int] | None = None, **sampling: Any) -> str:
        """Queues a request of `prompt` tokens whose content `first` decides, or of `ids`; returns its name."""
        from vllm import SamplingParams

        self._number += 1
        ids = ids or [1 + (first + position) % 100 for position in range(prompt)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        self.engine.add_request(f"r{self._number}", {"prompt_token_ids": ids}, params)
        return f"r{self._number}"

    def commit(self) -> int:
        """Commits the next version, between two steps."""
        assert self.engine.commit_weights(self.witness.version + 1) == [self.witness.version + 1]
        self.witness.version += 1
        return self.witness.version

    def step(self, count: int = 1) -> list[Any]:
        """Steps, and returns the outputs of all steps."""
        return [output for _ in range(count) for output in self.engine.step()]

    def finish(self) -> dict[str, Any]:
        """Steps until nothing is left; returns the final output of each request."""
        outputs = {}
        while self.engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in self.step() if output.finished})
        return outputs

    def check(self, output: Any, name: str | None = None, index: int = 0) -> Any:
        """Holds one completion's claims against the witness; returns the completion."""
        completion = output.outputs[index]
        prompt, tokens = len(output.prompt_token_ids), len(completion.token_ids)
        claims = completion.token_versions, completion.prefill_versions
        _assert_exact(self.witness, name or output.request_id, prompt, tokens, *claims)
        return completion


def _assert_exact(
    witness: Witness, name: str, prompt: int, tokens: int, versions: Versions, prefills: Prefills
) -> None:
    seen = witness.kv(name, prompt, tokens)
    assert claimed_kv(prompt, tokens, versions, prefills) == seen
    # The newest KV is of the sampling step itself, so its version is the token's.
    assert [kv[-1] for kv in seen] == [
        [version for start, version in versions if start <= index][-1] for index in range(tokens)
    ]
    assert [start for start, _ in versions] == sorted({start for start, _ in versions})
    assert all(left[1] != right[1] for left, right in itertools.pairwise(versions))


def make_worker(*args: Any, **kwargs: Any) -> Any:
    """A CPU worker with the method that a commit calls; vLLM takes any importable callable as worker class."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    class Worker(CPUWorker):
        def commit_weights(self, version: int) -> int:
            if version == 666:
                raise RuntimeError("the swap failed")
            return version

    return Worker(*args, **kwargs)


def executor_without_model() -> Any:
    """An executor whose worker knows the size of one layer's KV and how to commit; the lab draws its tokens."""
    import torch
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class Stand:
        def get_kv_cache_spec(self) -> dict[str, Any]:
            sizes: Any = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
            return {"layer": FullAttentionSpec(**sizes)}

        def determine_available_memory(self) -> int:
            return 1 << 26

        def get_supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        def commit_weights(self, version: int) -> int:
            if version == 666:
                raise RuntimeError("the swap failed")
            return version

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    class Executor(UniProcExecutor):
        def _init_executor(self) -> None:
            self.driver_worker = Stand()

        def initialize_from_config(self, kv_cache_configs: Any) -> None:
            pass

        def compile_or_warm_up_model(self) -> None:
            pass

        def get_supported_kv_cache_layouts(self) -> list[list[str]]:
            return [["NHD", "HND"]]

    return Executor


def _drawn(output: Any, sampling: set[str], token: int) -> Any:
    """What a model would answer to a step: `token` for each request that samples."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    rows = [[token] if name in sampling else [] for name in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=rows,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The smallest Llama that vLLM runs on CPU."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield folder


@pytest.fixture(scope="module")
def lab(model: Path) -> Iterator[Lab]:
    lab = Lab(model)
    yield lab
    lab.engine.engine_core.shutdown()


def test_this_vllm_has_what_the_server_uses_of_it() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor

    used = {
        AsyncLLM: ["from_vllm_config", "shutdown", "get_supported_tasks", "errored", "dead_error"],
        AsyncMPClient: ["call_utility_async"],
        OutputProcessor: ["get_num_unfinished_requests"],
    }
    assert [name for owner, names in used.items() for name in names if not hasattr(owner, name)] == []
    assert "output_processor" in AsyncLLM.__init__.__code__.co_names


def test_spans_name_the_version_of_the_step_that_sampled_each_token(lab: Lab) -> None:
    short, long = lab.add(40, 20), lab.add(10, 30, first=50)
    first = lab.witness.version
    lab.step(5)
    lab.commit()
    lab.commit()  # no step runs under the first of two
    lab.step(4)
    lab.commit()
    outputs = lab.finish()
    completion = lab.check(outputs[short])
    assert completion.token_versions == [(0, first), (5, first + 2), (9, first + 3)]
    assert completion.prefill_versions == [(0, 0, first)]
    if hasattr(completion, "weight_versions"):  # since 0.32 vLLM has labels of its own, by the same stamp now
        spans = [(span.version, span.start, span.end) for span in completion.weight_versions]
        assert spans[1:] == [(str(first + 2), 5, 9), (str(first + 3), 9, 20)]
    lab.check(outputs[long])


@pytest.mark.parametrize("prompt", [150, 2 * CHUNK + 1])  # the last chunk of 22 tokens, and of one
def test_a_commit_within_a_chunked_prefill_is_reported_by_position(lab: Lab, prompt: int) -> None:
    name, before = lab.add(prompt, 6, first=prompt), lab.witness.version
    lab.step()
    lab.commit()
    lab.step()
    lab.commit()
    completion = lab.check(lab.finish()[name])
    assert completion.prefill_versions == [
        (0, 0, before),
        (0, CHUNK, before + 1),
        (0, 2 * CHUNK, before + 2),
    ]
    assert completion.token_versions == [(0, before + 2)]


def test_a_pass_that_restarts_under_the_same_version_is_reported(lab: Lab) -> None:
    name, before = lab.add(100, 6, first=11), lab.witness.version
    lab.step()
    lab.commit()
    lab.step(3)
    lab.core.reset_prefix_cache(reset_running_requests=True)
    completion = lab.check(lab.finish()[name])
    assert completion.prefill_versions == [(0, 0, before), (0, CHUNK, before + 1), (3, 0, before + 1)]


def test_a_preempted_request_is_prefilled_again_under_the_version_of_its_return(lab: Lab) -> None:
    names = [lab.add(60, 110, first=20), lab.add(62, 112, first=70)]
    outputs: dict[str, Any] = {}
    while lab.engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in lab.step(7) if output.finished})
        lab.commit()
    events = [lab.check(outputs[name]).prefill_versions for name in names]
    resumed = [event for request in events for event in request if event[0] > 0 and event[1] == 0]
    assert resumed  # the pool is too small for both, so one had to wait


def test_a_prefix_is_found_only_under_the_version_that_computed_all_of_it(lab: Lab) -> None:
    def run(ids: list[int] | None = None, tokens: int = 40, commit_after: int | None = None) -> Any:
        name = lab.add(40, tokens, first=33, ids=ids)
        if commit_after is not None:
            lab.step(commit_after)
            lab.commit()
        output = lab.finish()[name]
        lab.check(output)
        return output

    assert run().num_cached_tokens == 0
    assert run().num_cached_tokens == BLOCK
    lab.commit()
    assert run().num_cached_tokens == 0
    both = run(commit_after=10)
    assert both.num_cached_tokens == BLOCK
    # Its first block is of the older version, and the second of both.
    assert run(tokens=1).num_cached_tokens == 0
    longer = [*both.prompt_token_ids, *both.outputs[0].token_ids]
    assert run(longer).num_cached_tokens == BLOCK
    assert run(longer).num_cached_tokens == 2 * BLOCK


def test_deltas_and_children_carry_their_own_spans(lab: Lab) -> None:
    from vllm.sampling_params import RequestOutputKind

    stream = lab.add(20, 12, output_kind=RequestOutputKind.DELTA)
    twins = lab.add(24, 12, first=60, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    deltas, final = [], None
    for step in range(14):
        for output in lab.step():
            if output.request_id == stream:
                deltas.append(output)
            else:
                final = output
        if step % 2:
            lab.commit()
    starts = [delta.outputs[0].token_versions[0][0] for delta in deltas]
    assert starts == list(range(12))
    assert all(not delta.outputs[0].prefill_versions for delta in deltas[:-1])
    merged = deltas[0]
    for delta in deltas[1:]:
        merged.add(delta, aggregate=True)
    assert [start for start, _ in lab.check(merged).token_versions] == [0, 2, 4, 6, 8, 10]
    assert final is not None
    for index in (0, 1):
        lab.check(final, name=f"{index}_{twins}", index=index)


def test_an_older_version_is_refused_and_an_error_of_a_rank_reaches_the_caller(lab: Lab) -> None:
    version = lab.commit()
    with pytest.raises(ValueError, match=f"{version} is not greater than the current {version}"):
        lab.engine.commit_weights(version)
    assert lab.engine.engine_core.call_utility("weight_version") == version
    lab.witness.version = 666
    with pytest.raises(RuntimeError, match="the swap failed"):
        lab.engine.commit_weights(666)


@pytest.mark.parametrize("reset", [False, True])
def test_asynchronous_scheduling_stamps_at_dispatch(lab: Lab, reset: bool) -> None:
    """Steps overlap, commits fall between dispatch and processing, requests are preempted with output in flight.

    Each sampled token *is* the version in force at its dispatch, so that every stamp can be compared with its token.
    """
    scheduler, witness = _async_scheduler(lab), Witness()
    prompts = {"a": 60, "b": 62, "c": 150}
    for name, prompt in prompts.items():
        scheduler.add_request(_request(lab, name, prompt, tokens=24 if name == "c" else 100))
    claims: dict[str, tuple[list[int], Versions, Prefills]] = {name: ([], [], []) for name in prompts}
    in_flight: deque[tuple[Any, int, set[str]]] = deque()
    for step in range(700):
        if step % 5 == 3:
            witness.version += 1
            scheduler.set_weight_version(witness.version)
        if reset and step in (40, 90):
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if scheduler.has_requests():
            output = scheduler.schedule()
            in_flight.append((output, witness.version, witness.dispatch(output, scheduler)))
        if len(in_flight) > 1 or not scheduler.has_requests():
            if not in_flight:
                break
            _receive(scheduler, *in_flight.popleft(), claims)
    preempted = 0
    for name, (tokens, versions, prefills) in claims.items():
        assert len(tokens) == (24 if name == "c" else 100)
        assert [[v for start, v in versions if start <= i][-1] for i in range(len(tokens))] == tokens
        _assert_exact(witness, name, prompts[name], len(tokens), versions, prefills)
        preempted += sum(event[0] > 0 and event[1] == 0 for event in prefills)
    assert preempted


def test_the_engine_core_keeps_each_steps_own_stamp_while_steps_overlap(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through the engine core's queue of batches, up to the outputs a caller gets."""
    core, scheduler = lab.core, _async_scheduler(lab)
    scheduler.set_weight_version(lab.witness.version)
    drawn: deque[Any] = deque()

    def execute_model(output: Any, **kwargs: Any) -> Any:
        sampling = lab.witness.dispatch(output, scheduler)
        result = _drawn(output, sampling, token=lab.witness.version)
        if not output.total_num_scheduled_tokens:
            return _done(result)
        drawn.append(result)
        return _done(None)

    monkeypatch.setattr(core, "scheduler", scheduler)
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    monkeypatch.setattr(core.model_executor, "execute_model", execute_model)
    monkeypatch.setattr(core.model_executor, "sample_tokens", lambda *_, **__: _done(drawn.popleft()))
    lengths = {lab.add(60, 100, first=20): 100, lab.add(62, 101, first=70): 101, lab.add(150, 20): 20}
    outputs: dict[str, Any] = {}
    while lab.engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in lab.step(5) if output.finished})
        lab.commit()
    for name, length in lengths.items():
        completion = lab.check(outputs[name])
        versions = [[v for start, v in completion.token_versions if start <= index][-1] for index in range(length)]
        assert completion.token_ids == versions
        for span in getattr(completion, "weight_versions", []):
            tokens = set(completion.token_ids[span.start : span.end])
            assert tokens == {0 if span.version == "default" else int(span.version)}


def _async_scheduler(lab: Lab) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler(
        vllm_config=lab.core.vllm_config,
        kv_cache_config=lab.core.scheduler.kv_cache_config,
        structured_output_manager=lab.core.structured_output_manager,
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def _request(lab: Lab, name: str, prompt: int, tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ids = [ord(name) + position for position in range(prompt)]
    hasher = lab.core.request_block_hasher
    return Request(f"{name}-0", ids, params, pooling_params=None, block_hasher=hasher)


def _receive(
    scheduler: Any,
    output: Any,
    version: int,
    sampling: set[str],
    claims: dict[str, tuple[list[int], Versions, Prefills]],
) -> None:
    """Processes one step's output as the engine core and the output processor do."""
    from vllm.outputs import extend_token_versions

    results = scheduler.update_from_output(output, _drawn(output, sampling, token=version))
    for result in (result for client in results.values() for result in client.outputs):
        tokens, versions, prefills = claims[_external(result.request_id)]
        if result.new_token_ids:
            extend_token_versions(versions, [(len(tokens), result.weight_version)])
        tokens += result.new_token_ids
        prefills += result.prefill_versions or []


def test_sharing_across_versions_is_possible_and_reported(model: Path, lab: Lab) -> None:
    lab.engine.engine_core.shutdown()  # one engine per process
    shared = Lab(model, share_prefix_across_versions=True, version=4)
    shared.add(100, 4)
    shared.finish()
    shared.commit()
    name = shared.add(100, 4)
    output = shared.finish()[name]
    shared.engine.engine_core.shutdown()
    assert output.num_cached_tokens == 96
    assert output.outputs[0].token_versions == [(0, 5)]
    assert output.outputs[0].prefill_versions == [(0, 0, -1), (0, 96, 5)]
