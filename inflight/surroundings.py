"""The environment of a run's processes: which of the caller's variables they inherit, which are set for them, and their
limit of open files."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterable, Mapping, MutableMapping

_FOREIGN = {
    # Ranks and rendezvous addresses that torchrun, MPI or Slurm gave to the caller: Accelerate, torch and vLLM would
    # use them, and wait for the other ranks of a program that has none. The last one is the secret of the launcher and
    # of hosts that join: a task's or a reward's code could place processes on them.
    "": r"""
    RANK WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK LOCAL_(RANK|WORLD_SIZE) GROUP_(RANK|WORLD_SIZE)
    ROLE_(RANK|WORLD_SIZE|NAME) TORCHELASTIC_.* PET_.* PMI_.* PMIX_.* MPI_LOCAL.* OMPI_COMM_WORLD_.*
    MV2_COMM_WORLD_.* SLURM_(?!JOB_?ID$|TMPDIR$).*
    ACCELERATE_.* FSDP_.* PARALLELISM_CONFIG_.* MEGATRON_LM_.* FORK_LAUNCHED
    VLLM_PORT VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_DP_.* VLLM_RAY_.* VLLM_ELASTIC_EP_.* VLLM_TEST_.*
    INFLIGHT_JOIN_KEY
    """,
    # vLLM's custom all-reduce exports memory of torch's allocator over CUDA IPC, which expandable segments do not
    # allow. The trainer keeps the setting: its transport depends on it (weights/transport).
    "generator": "PYTORCH_((CUDA|HIP)_)?ALLOC_CONF",
}
"""Patterns of the variables that a process of this kind ("": of any) does not inherit. All others are inherited, among
them HF_*, CUDA_*, NCCL_*, API keys and proxies."""


def foreign(names: Iterable[str], kind: str) -> list[str]:
    """The caller's variables, sorted, that a process of this kind does not inherit."""
    patterns = [*_FOREIGN[""].split(), *_FOREIGN.get(kind, "").split()]
    whole = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return sorted(name for name in names if whole.fullmatch(name))


def inherited(environment: Mapping[str, str], kind: str) -> dict[str, str]:
    """The caller's variables that a process of this kind inherits."""
    dropped = set(foreign(environment, kind))
    return {name: value for name, value in environment.items() if name not in dropped}


def forget_foreign(environment: MutableMapping[str, str], kind: str) -> list[str]:
    """Removes variables from a process's own environment that it should not have inherited; returns their names. Must
    be called before torch or vLLM is imported."""
    dropped = foreign(environment, kind)
    for name in dropped:
        del environment[name]
    return dropped


def expandable_segments(environment: Mapping[str, str]) -> str:
    """`NAME=value` of the setting that makes torch's allocator use expandable segments in the trainer; empty: none.
    Their memory can't be exported over CUDA IPC."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in (value := environment.get(name, "")).replace(" ", ""):
            return f"{name}={value}"
    return ""


def computing(threads: int) -> dict[str, str]:
    """Variables of a process that computes with this many threads; nothing is downloaded from a hub."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def allow_open_files() -> int:
    """Raises this process's soft limit of open files to the hard one, also for its children: each request in progress
    is a connection, and shells allow 1,024. Returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft
