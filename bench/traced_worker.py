"""Our CUDA worker with a clock, for `bench.interruption trace=true`: when the device was done with each step, when the
output thread had its tokens and had handed them on, and what the receiver's thread did when.

All moments are seconds of time.perf_counter, which the processes of one machine share.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from bench.compared_worker import ComparedWorker
from inflight.generator.shadow.graphs import GraphSetsShadow
from inflight.weights.receive.receiver import WeightReceiver
from inflight.weights.transport.ipc import IpcReceiver
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.sums import RankSums

OUTPUTS = ((AsyncGPUModelRunnerOutput, "async_output_copy_stream"), (AsyncOutput, "copy_stream"))
"""A step's output in vLLM's two runners, and the argument that is the stream which copies its tokens to the host."""
WATCHED = {
    WeightReceiver: ("_prepare", "_tell", "swap"),
    KeyValueStore: ("take", "put", "reply", "confirm", "drop"),
    IpcReceiver: ("_pull",),
    RankSums: ("begin", "check"),
    GraphSetsShadow: ("begin", "build"),
    Worker: ("execute_model", "sample_tokens"),
}


class TracedWorker(ComparedWorker):
    """Notes nothing before the first `take_trace`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As the worker's own, with clocks."""
        self._traced_steps: list[tuple[torch.cuda.Event, float, float]] = []
        self._traced_spans: list[tuple[str, float, float]] = []
        self._traced_zero: torch.cuda.Event | None = None
        self._traced_zero_at = 0.0
        for output, stream in OUTPUTS:
            self._time_output(output, stream)
        self._time_handing_on()
        for owner, names in WATCHED.items():
            for name in names:
                setattr(owner, name, self._timed(f"{owner.__name__}.{name}", getattr(owner, name)))
        gc.callbacks.append(self._collecting)
        super().load_model(*args, **kwargs)

    def take_trace(self) -> dict[str, list[tuple[Any, ...]]]:
        """RPC: `steps` (done, got, handed) and `spans` (what, begin, end) since the last call."""
        torch.cuda.synchronize(self.device)
        zero = self._traced_zero
        zero_at = self._traced_zero_at
        steps, self._traced_steps = self._traced_steps, []
        spans, self._traced_spans = self._traced_spans, []
        self._traced_zero = torch.cuda.Event(enable_timing=True)
        self._traced_zero.record()
        self._traced_zero.synchronize()
        self._traced_zero_at = time.perf_counter()
        known = [] if zero is None else [(zero_at + zero.elapsed_time(done) / 1e3, *rest) for done, *rest in steps]
        return {"steps": known, "spans": spans}

    def _time_output(self, output: type[Any], stream: str) -> None:
        init = output.__init__
        get = output.get_output

        @functools.wraps(init)
        def timed_init(step: Any, *args: Any, **kwargs: Any) -> None:
            init(step, *args, **kwargs)
            if self._traced_zero is not None and stream in kwargs:  # both runners name it
                step.inflight_done = torch.cuda.Event(enable_timing=True)
                step.inflight_done.record(kwargs[stream])

        def timed_get(step: Any) -> Any:
            found = get(step)
            step.inflight_got = time.perf_counter()
            return found

        output.__init__ = timed_init
        output.get_output = timed_get

    def _time_handing_on(self) -> None:
        enqueue = WorkerProc.enqueue_output

        def timed(process: Any, output: Any) -> None:
            enqueue(process, output)
            if hasattr(output, "inflight_done") and hasattr(output, "inflight_got"):
                self._traced_steps.append((output.inflight_done, output.inflight_got, time.perf_counter()))

        WorkerProc.enqueue_output = timed

    def _timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._traced_spans.append((what, begin, time.perf_counter()))

        return timed

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._traced_collection_began = time.perf_counter()
        else:
            self._traced_spans.append(
                (f"gc of generation {info['generation']}", self._traced_collection_began, time.perf_counter())
            )
