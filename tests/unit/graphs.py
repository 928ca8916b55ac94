"""A runner of vLLM's as far as CUDA graphs go, on a CPU: its own wrapper around a model, captured for two sizes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu_worker  # noqa: F401 - else it, and tvm_ffi with it, would be imported while CUDA is a stub
from vllm.compilation import cuda_graph
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.platforms import current_platform

from inflight.generator.shadow.cuda_plan import Region

SIZES = (4, 2)


class Graph:
    """In place of a CUDA graph: keeps using the memory that the model's parameters had when it was captured."""

    model: Any = None
    replayed: Any = None

    def __init__(self) -> None:
        data = [self.model.weight.data, self.model.bias.data]
        # Addresses alone, as a graph has them: no tensor is kept.
        self.at = [(one.untyped_storage(), one.storage_offset(), one.shape) for one in data]

    def replay(self) -> None:
        Graph.replayed = [torch.empty(0).set_(storage, at, shape) for storage, at, shape in self.at]


def layout_of(model: torch.nn.Linear) -> Any:
    """The model's parameters, and one that is tied to the first, in 264 bytes."""
    model.tied = torch.nn.Parameter(model.weight.data, requires_grad=False)
    regions = [Region("weight", 0, 24), Region("bias", 256, 264)]
    return SimpleNamespace(regions=regions, tensors=[model.weight, model.bias], aliases=[(model.tied, 0)], nbytes=264)


class Runner:
    """What a runner has to do with graphs: vLLM's own wrapper around the model, captured for two sizes."""

    def __init__(self, model: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def capturing(graph: Graph, **_: Any) -> Iterator[None]:
            yield

        Graph.model = model
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capturing)
        monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
        monkeypatch.setattr(type(current_platform), "_global_graph_pool", (0, 0), raising=False)
        for wrapper in (cuda_graph.CUDAGraphWrapper, BreakableCUDAGraphWrapper):
            monkeypatch.setattr(wrapper, "_all_instances", weakref.WeakSet())
        self.config = VllmConfig()
        self.wrapper = cuda_graph.CUDAGraphWrapper(model, self.config, CUDAGraphMode.FULL)
        self.parallel_config = SimpleNamespace(use_ubatching=False)
        self.cudagraph_manager = SimpleNamespace(graphs={})
        self.estimate = 0

    def run(self, size: int) -> None:
        batch = BatchDescriptor(num_tokens=size)
        with set_forward_context(
            None, self.config, num_tokens=size, cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=batch
        ):
            self.wrapper(torch.ones(size, 3))

    def profile_cudagraph_memory(self) -> int:
        return self.estimate

    def capture_model(self, *, profile_only: bool = False) -> int:
        if profile_only:  # vLLM measures and throws away what it captured
            return 30
        for size in SIZES:
            self.run(size)
            assert size not in self.cudagraph_manager.graphs, "vLLM refuses to capture a shape twice"
            self.cudagraph_manager.graphs[size] = Graph()
            compilation_counter.num_cudagraph_captured += 1
        return 100
