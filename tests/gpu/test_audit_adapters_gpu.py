"""The tests of tests/cpu/test_audit_adapters.py beneath CUDA graphs, with tensor parallel 1 and 2.

In bfloat16, as vLLM's LoRA kernels on CUDA take no float32: a sound run has no faults, and is not shown to have none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn")

from bench.faulty_adapters import FaultyAdapters
from inflight.models import prepare
from tests.cpu.test_audit_adapters import (
    start,
    test_a_prefix_hit_across_versions_is_found,
    test_a_wrong_or_stale_slot_is_found,
    test_every_token_of_two_adapters_is_confirmed,
    test_tags_of_another_lineage_are_found,
    test_the_engine_is_whole_after_all_this,
)

pytestmark = pytest.mark.gpu

__all__ = [
    "test_a_prefix_hit_across_versions_is_found",
    "test_a_wrong_or_stale_slot_is_found",
    "test_every_token_of_two_adapters_is_confirmed",
    "test_tags_of_another_lineage_are_found",
    "test_the_engine_is_whole_after_all_this",
]

BLOCKS = 25  # of 16 tokens; six sequences of full length need 48


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyAdapters]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    arguments = {
        "worker_cls": "inflight.generator.worker.adapter_cuda.InflightCUDAAdapterWorker",
        "num_gpu_blocks_override": BLOCKS,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.1,
        "tensor_parallel_size": request.param,
    }
    engine = start(tmp_path_factory.mktemp("engine"), prepare("tiny"), "bfloat16", arguments)
    yield engine
    engine.close()
