"""GPUs: what the driver lists, whether CUDA computes on them, and what they can read of each other's memory."""

from __future__ import annotations

from collections.abc import Iterator

from inflight.config import ConfigError, RunConfig
from inflight.doctor.finding import Finding, fail, ok, warn
from inflight.doctor.probe import ProbeError, ask
from inflight.launcher import devices

CUDA_S = 120.0
IPC_S = 300.0
GIB = 1 << 30


def listed() -> tuple[list[str], Finding]:
    """The GPUs that a run would be given, and a line about them."""
    try:
        found = devices.available()
    except ConfigError as error:
        return [], fail("GPUs", str(error), "restart the machine, or set CUDA_VISIBLE_DEVICES= to run on the CPU")
    if not found:
        return [], ok("GPUs", "none; runs use the CPU (machine=cpu)")
    return found, ok("GPUs", f"{len(found)}: {', '.join(found)}")


def required(config: RunConfig) -> Iterator[Finding]:
    """Whether the GPUs are there that the configuration asks for."""
    try:
        devices.require_gpu(config)
    except ConfigError as error:
        yield fail("GPUs", str(error), "a machine with a GPU, or machine=cpu")


def checked() -> Iterator[Finding]:
    """CUDA on each GPU, peer access and CUDA IPC. To be called where there are GPUs."""
    try:
        found = ask("cuda", timeout_s=CUDA_S)["devices"]
    except ProbeError as error:
        yield fail("CUDA", str(error), "check `nvidia-smi`, and that torch's CUDA is not newer than the driver's")
        return
    if not found:
        yield fail("CUDA", "torch finds no GPU, though the driver lists some", "install the extra gpu")
        return
    for index, device in enumerate(found):
        text = f"{device['name']}, {device['free'] / GIB:.1f} of {device['total'] / GIB:.1f} GiB free"
        if not device["computes"]:
            yield fail(f"GPU {index}", f"{text}; a sum was wrong", "do not use this GPU")
        elif device["free"] < device["total"] / 2:
            yield warn(f"GPU {index}", text, "end what else uses it: `nvidia-smi`")
        else:
            yield ok(f"GPU {index}", text)
    yield from _peers([device["peers"] for device in found])
    yield from _ipc(len(found))


def _peers(peers: list[list[int]]) -> Iterator[Finding]:
    """The trainer's GPU is the first; generators read from it."""
    apart = [index for index in range(1, len(peers)) if 0 not in peers[index]]
    if len(peers) < 2:
        return
    if apart:
        yield warn(
            "peer access",
            f"GPU 0 from GPU {', '.join(map(str, apart))}: none",
            "weights go through host memory, which is slower; ask for GPUs that are connected",
        )
    else:
        yield ok("peer access", "every GPU can read GPU 0's memory")


def _ipc(gpus: int) -> Iterator[Finding]:
    """Without CUDA IPC weights can be sent over NCCL, which does not join two processes of one GPU."""
    serious, instead = (warn, "publish.transport=nccl") if gpus > 1 else (fail, "a second GPU, publish.transport=nccl")
    try:
        found = ask("ipc", timeout_s=IPC_S)
    except ProbeError as error:
        yield serious("CUDA IPC", str(error), instead)
        return
    if found["failed"]:
        reasons = "; ".join(f"to GPU {index}: {reason}" for index, reason in found["failed"].items())
        yield serious("CUDA IPC", reasons, f"{instead}; in a container: --ipc=host")
    else:
        yield ok("CUDA IPC", f"memory of GPU 0 was read by other processes on {found['devices']} GPUs")
