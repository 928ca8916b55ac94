"""Environment variables that would disturb a run, or that its processes pass on to vLLM, NCCL and CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from inflight.config import ConfigError, RunConfig
from inflight.doctor.finding import Finding, fail, ok, warn
from inflight.launcher import devices
from inflight.surroundings import expandable_segments, foreign

PASSED_ON = ("VLLM_", "NCCL_", "CUDA_", "TORCH_", "PYTORCH_")
SLOW = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1", "TORCH_USE_CUDA_DSA": "1"}
"""Settings for debugging, which make a run slow."""


def variables(environment: Mapping[str, str], config: RunConfig | None, gpus: Sequence[str]) -> Iterator[Finding]:
    """What the caller's environment holds; values are not shown, since some are secrets."""
    name = "environment"
    dropped = foreign(environment, "")
    if dropped:
        yield ok(name, f"set, but not inherited by a run's processes: {', '.join(dropped)}")
    passed = sorted(each for each in environment if each.startswith(PASSED_ON) and each not in dropped)
    yield ok(name, f"passed on: {', '.join(passed)}" if passed else "nothing in it concerns vLLM, NCCL or CUDA")
    for variable, value in SLOW.items():
        if environment.get(variable) == value:
            yield warn(name, f"{variable}={value} makes a run slow", f"unset {variable}")
    if environment.get("LD_PRELOAD"):
        yield warn(name, "LD_PRELOAD puts a library into every process", "unset LD_PRELOAD where it is not needed")
    yield from _allocator(environment, config, gpus)


def _allocator(environment: Mapping[str, str], config: RunConfig | None, gpus: Sequence[str]) -> Iterator[Finding]:
    setting = expandable_segments(environment)
    if not setting or not gpus:
        return
    try:
        if config is not None:
            devices.require_exportable(config, list(gpus), environment)
    except ConfigError as error:
        yield fail("environment", str(error), f"unset {setting.partition('=')[0]}")
        return
    todo = f"unset {setting.partition('=')[0]} where all run on one host"
    yield warn("environment", f"with {setting} weights are sent over NCCL, not CUDA IPC", todo)
