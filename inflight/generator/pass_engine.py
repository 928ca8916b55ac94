"""Single forward passes through vLLM's model runner on CPU, under any weights: an engine without a scheduler.

Used by the audit to compute what the engine computes. Each pass is a request of its own whose KV is already there,
which is all that the model runner needs to know. A version is loaded into a new model by vLLM's own loader: neither the
swap nor tags, scheduler or prefix cache take part.

On many CPUs a row of a batch is bit-identical whatever the other rows are, as long as there are at least two: a single
row uses another kernel. So a single row is paired with a filler row here. A CPU on which rows depend on the size of
the batch is refused: with AMX, one row in thirty of a batch of five or more differs from that of a smaller batch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inflight.config import RunConfig
from inflight.error_line import one_line
from inflight.generator import hooks
from inflight.generator.engine_args import CPU_WORKER, engine_values, environment
from inflight.surroundings import forget_foreign

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData

MAX_BATCH = 16
"""Most passes in one batch."""
MAX_STEP_TOKENS = 8192
ROUNDS_BY_BATCH = "this CPU's kernels round by the size of the batch"
PROBE_ROWS = 8
PROBE_TOKENS = 33
"""Number of sequences, and tokens of each, in the check that a row does not depend on the size of its batch: 256 rows,
of which one in thirty is enough."""


class EngineMissing(RuntimeError):
    """No vLLM here can run passes; the text says why."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over `tokens[start:]`, reading the KV of all tokens before and writing its own."""

    tokens: Sequence[int]
    start: int
    blocks: list[int]
    """KV blocks of the sequence, enough for all tokens."""


class PassEngine:
    """A vLLM on CPU in this process. Weights are random until `load`."""

    def __init__(self, model_dir: Path, config: RunConfig, *, lengths: Sequence[int]) -> None:
        """Starts an engine configured like those of the run, with KV cache for sequences of these lengths together.

        Raises EngineMissing when no vLLM for CPU is installed.
        """
        self._worker = _start(model_dir, config, lengths)
        self._runner = self._worker.model_runner
        self.block_size: int = self._worker.cache_config.block_size
        """Tokens per block of the KV cache."""
        self._free = list(range(1, self._runner.kv_cache_config.num_blocks))  # block 0 is vLLM's null block
        self._fresh: list[int] = []
        self._company = self.take(1)
        self._names = (f"pass-{number}" for number in itertools.count())
        self._finished: set[str] = set()
        self._probed = False

    @property
    def room(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def blocks(self, tokens: int) -> int:
        """Number of blocks that this many tokens need."""
        return -(-tokens // self.block_size)

    def take(self, tokens: int) -> list[int]:
        """Allocates blocks for this many tokens. Raises EngineMissing when the cache has too few left."""
        count = self.blocks(tokens)
        if count > len(self._free):
            raise EngineMissing(f"the KV cache has {len(self._free)} blocks left, {count} are needed")
        taken = [self._free.pop() for _ in range(count)]
        self._fresh += taken
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Frees blocks whose KV is no longer needed."""
        self._free += blocks

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Makes a new model with these weights (checkpoint names); its attention layers take over the KV cache.

        Raises whatever vLLM's loaders raise when the weights do not fit, and at the first call EngineMissing when the
        result of a row depends on how many other rows there are.
        """
        config = self._worker.vllm_config
        layers = config.compilation_config.static_forward_context
        before = dict(layers)
        layers.clear()
        self._runner.model = None  # freed before the next one is made
        self._runner.model = _loader(state, config.load_config).load_model(config, config.model_config)
        for name, layer in layers.items():
            layer.kv_cache = before[name].kv_cache
            for key, value in vars(before[name]).items():  # attributes that the engine set after construction
                vars(layer).setdefault(key, value)
        if not self._probed:
            self._require_rows_alike()
            self._probed = True

    def run(self, passes: Sequence[Pass], *, alone: bool = False) -> list[torch.Tensor]:
        """[V] float32 logits after the last token of each of at most MAX_BATCH passes.

        `alone`: a single row is not paired with a filler row, and so uses the kernel of a sequence alone in its step.
        """
        requests = [self._request(each) for each in passes]
        if not alone and len(passes) == 1 and len(passes[0].tokens) - passes[0].start == 1:
            requests.append(self._request(Pass([0], 0, self._company)))
        rows = self._forward(requests)
        return [rows[request.req_id] for request in requests[: len(passes)]]

    def _require_rows_alike(self) -> None:
        """Raises EngineMissing when the result of a row depends on how many other rows there are. It needs a model's
        true weights: with vLLM's small random ones no kernel's rounding shows."""
        sequences = [
            ([(7 * row + at * (1 + row % 3)) % 8 + 1 for at in range(PROBE_TOKENS)], self.take(PROBE_TOKENS))
            for row in range(PROBE_ROWS)
        ]
        self.run([Pass(tokens[:1], 0, blocks) for tokens, blocks in sequences])
        try:
            for end in range(2, PROBE_TOKENS + 1):
                rows = [Pass(tokens[:end], end - 1, blocks) for tokens, blocks in sequences]
                in_twos = [logits for at in range(0, PROBE_ROWS, 2) for logits in self.run(rows[at : at + 2])]
                if not all(map(torch.equal, self.run(rows), in_twos)):
                    raise EngineMissing(ROUNDS_BY_BATCH)
        finally:
            for _, blocks in sequences:
                self.give_back(blocks)

    def _request(self, each: Pass) -> NewRequestData:
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        return NewRequestData(
            req_id=next(self._names),
            prompt_token_ids=list(each.tokens),
            mm_features=[],
            sampling_params=SamplingParams(temperature=0, max_tokens=1),
            pooling_params=None,
            block_ids=(each.blocks,),
            num_computed_tokens=each.start,
            lora_request=None,
        )

    def _forward(self, requests: list[NewRequestData]) -> dict[str, torch.Tensor]:
        from vllm.v1.core.sched.output import SchedulerOutput

        step = SchedulerOutput.make_empty()
        step.scheduled_new_reqs = requests
        step.num_scheduled_tokens = {
            each.req_id: len(each.prompt_token_ids or ()) - each.num_computed_tokens for each in requests
        }
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        step.finished_req_ids, self._finished = self._finished, {each.req_id for each in requests}
        step.new_block_ids_to_zero, self._fresh = self._fresh, []
        self._worker.execute_model(step)
        # The logits are stored for `sample_tokens`, which is not called: nothing is sampled here.
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        return dict(zip(self._runner.input_batch.req_ids, state.logits.float(), strict=True))


def _start(model_dir: Path, config: RunConfig, lengths: Sequence[int]) -> Any:
    """The worker of an engine that runs in this process."""
    try:
        hooks.require("cpu")
    except hooks.HookChanged as error:
        raise EngineMissing(str(error)) from None
    forget_foreign(os.environ, "generator")
    os.environ.update(environment(config, os.environ), VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineMissing(f"vLLM can't be imported: {one_line(error)}") from None
    if not current_platform.is_cpu():
        raise EngineMissing("vLLM here is not for CPUs; a GPU's kernels round by the size of the batch")
    arguments = {
        **engine_values(config, "passes", CPU_WORKER),
        "model": str(model_dir),
        "load_format": "dummy",
        "hf_overrides": {"tie_word_embeddings": False},  # so that the output layer can be loaded separately
        "tensor_parallel_size": 1,
        "max_num_seqs": MAX_BATCH + 1,
        "max_num_batched_tokens": MAX_STEP_TOKENS,
        "gpu_memory_utilization": 0.05,  # of a machine on which a training run may be active
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "worker_cls": "inflight.generator.worker.amx.AmxCPUWorker",
        "additional_config": {},
    }
    engine = EngineArgs(**arguments).create_engine_config()
    cache = engine.cache_config
    probe = PROBE_ROWS * -(-PROBE_TOKENS // cache.block_size)
    cache.num_gpu_blocks_override = 2 + probe + sum(-(-length // cache.block_size) for length in lengths)
    client: Any = LLMEngine.from_vllm_config(engine).engine_core
    return client.engine_core.model_executor.driver_worker.worker


def _loader(state: dict[str, torch.Tensor], load_config: Any) -> Any:
    """A vLLM model loader that reads from memory."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class FromMemory(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Does nothing: there is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(iter(state.items()))

    return FromMemory(load_config)
