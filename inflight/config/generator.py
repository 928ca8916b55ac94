"""Options of the vLLM engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inflight.config.checks import MAX_PROCESSES, require_fields, require_one_of

SWAPS = {"CPU": ("rebind",), "CUDA": ("graphs", "remap", "copy", "host")}
"""Ways to swap by the device of a generator, in addition to `auto`."""


@dataclass(frozen=True)
class GeneratorConfig:
    """The vLLM engines."""

    count: int = 1
    tensor_parallel_size: int = 1
    max_model_len: int = 256
    max_num_seqs: int = 32
    kv_cache_gib: float = 1.0
    prefix_caching: bool = True
    share_prefix_across_versions: bool = False
    swap: str = "auto"
    """How a new version becomes live: docs/gpu.md. On a CPU it is always `rebind`."""
    threads: int = 1
    """CPU threads of each worker (OMP_NUM_THREADS)."""
    start_timeout_s: float = 300.0
    server: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's HTTP server, such as tool and reasoning parsers and a chat template."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Passed to vLLM's engine arguments unchanged."""

    def __post_init__(self) -> None:
        require_fields(self, "generator", "max_model_len max_num_seqs threads", least=1)
        require_fields(self, "generator", "count tensor_parallel_size", least=1, most=MAX_PROCESSES)
        require_fields(self, "generator", "kv_cache_gib start_timeout_s")
        require_one_of(self, "generator", "swap", ("auto", *SWAPS["CUDA"], *SWAPS["CPU"]))
