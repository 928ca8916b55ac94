"""Where a process runs, by which the transport to it is chosen: host, GPUs, and the software that both ends share."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import socket
from pathlib import Path

import torch

from inflight.messages import Place

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED = ("ipc", "pid")
"""Namespaces of Linux that two processes must share for CUDA IPC."""


def place_of(device: torch.device) -> Place:
    """That of this process, which computes on `device`."""
    return Place(
        host=_host(),
        device="cuda" if device.type == "cuda" else "cpu",
        gpus=_visible_gpus() if device.type == "cuda" else [],
        inflight=_release("inflight"),
        torch=torch.__version__.partition("+")[0],
        vllm=_release("vllm"),
    )


def gpu_of(device: torch.device) -> str:
    """The UUID of a CUDA device; empty for another one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _visible_gpus() -> list[str]:
    return [gpu_of(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]


@functools.cache
def _host() -> str:
    """Equal in two processes if they run under one kernel and share the namespaces that CUDA IPC needs."""
    try:
        named = _BOOT_ID.read_text().strip()
    except OSError:
        named = socket.gethostname()
    inodes = [_inode(f"/proc/self/ns/{kind}") for kind in _SHARED]
    return "/".join([named, *map(str, inodes)])


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:  # a kernel or a sandbox without namespaces
        return 0


def _release(distribution: str) -> str:
    """Its version; empty when it is not installed. vLLM's wheels for CPU are a distribution of their own."""
    for name in (distribution, f"{distribution}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
