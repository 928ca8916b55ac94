"""Assigns GPUs to each process of a run, as values of CUDA_VISIBLE_DEVICES, and checks the configured CPU cores."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping

from inflight.config import SWAPS, ConfigError, RunConfig, require
from inflight.config.publish import ON_DEVICE
from inflight.surroundings import expandable_segments

QUERY_TIMEOUT_S = 30.0


def available() -> list[str]:
    """The GPUs that this process may assign; [] on a machine without any.

    Raises ConfigError when the driver does not answer.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        devices = [device.strip() for device in chosen.split(",")]
        return list(itertools.takewhile(lambda device: device not in ("", "-1"), devices))  # as CUDA reads it
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"can't list the GPUs: {error}; set CUDA_VISIBLE_DEVICES, empty for none") from None
    return done.stdout.split() if done.returncode == 0 else []


def require_gpu(config: RunConfig) -> None:
    """Raises ConfigError when the configuration requires a GPU and there is none."""
    transport = config.publish.transport
    swap = config.generator.swap
    choices = (
        (config.launch.needs_gpu, "machine=gpu (launch.needs_gpu=true)", "machine=cpu"),
        (transport in ON_DEVICE, f"publish.transport={transport}", "auto or gloo"),
        (swap in SWAPS["CUDA"], f"generator.swap={swap}", "auto or rebind"),
    )
    asked = [(name, instead) for needed, name, instead in choices if needed]
    if asked and not available():
        name, instead = asked[0]
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "nvidia-smi shows none" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} leaves none"
        raise ConfigError(f"{name} is not allowed: no GPU was found, {why}; without one: {instead}")


def require_exportable(config: RunConfig, devices: list[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError for settings of torch's allocator with which the trainer's weights can't be sent."""
    setting = expandable_segments(environment)
    transport = config.publish.transport
    if not devices or not setting or transport in ("nccl", "gloo"):
        return
    if transport == "ipc":
        raise ConfigError(
            f"publish.transport=ipc is not allowed with {setting}: such memory can't be exported; use nccl"
        )
    if len(devices) == 1:
        raise ConfigError(
            f"{setting} is not allowed where the trainer shares its GPU with a generator: such memory can't be "
            "exported over CUDA IPC, and NCCL does not join two processes of one GPU; unset it"
        )


def assign(config: RunConfig, devices: list[str]) -> dict[str, str]:
    """Process name → CUDA_VISIBLE_DEVICES, of the processes on this host; {} without GPUs.

    Each of the trainer's ranks gets one of the first, each generator as many of the next as it has ranks; a single GPU
    is shared by all. A generator also sees the GPU of the trainer's rank 0, after its own: it pulls weights from there
    over CUDA IPC.

    Example: four GPUs, one generator of two ranks: {"trainer": "0", "g0": "1,2,0"}.

    Raises ConfigError when there are too few.
    """
    if not devices:
        return {}
    names = [name for number, name in enumerate(config.generator_names()) if not config.hosts.of("generator", number)]
    ranks = config.generator.tensor_parallel_size
    trainers = config.rank_names()
    if len(devices) == 1 and ranks == len(trainers) == 1:
        return dict.fromkeys([*trainers, *names], devices[0])
    wanted = len(trainers) + len(names) * ranks
    if len(devices) < wanted:
        raise ConfigError(
            f"generator.count={len(names)} with generator.tensor_parallel_size={ranks} and "
            f"trainer.processes={len(trainers)} is not allowed: that takes {wanted} GPUs, there are {len(devices)}"
        )
    seen = dict(zip(trainers, devices, strict=False))
    for index, name in enumerate(names):
        first = len(trainers) + index * ranks
        seen[name] = ",".join([*devices[first : first + ranks], devices[0]])
    return seen


def require_cores(config: RunConfig) -> None:
    """Raises ConfigError when `cores` names a core that this machine does not have, or an unknown process."""
    allowed = os.sched_getaffinity(0)
    several = (*config.rank_names(), *config.generator_names(), *config.rollout.actor_names())
    known = {"generator", "actor", *several}
    for name, cores in config.launch.affinity.items():
        place = f"launch.affinity.{name}"
        require(name in known, place, list(cores), f"the names are {', '.join(sorted(known))}")
        require(set(cores) <= allowed, place, list(cores), f"this machine has {sorted(allowed)}")
