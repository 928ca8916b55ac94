"""What the doctor runs in processes of its own: `python -m inflight.doctor.probes ANSWER NAME [ARGUMENT ...]`.

Each function returns what goes into the file ANSWER, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open

PATTERN = 0xA5
PATTERN_BYTES = 1 << 20
OPEN_TIMEOUT_S = 60.0


def torch() -> dict[str, Any]:
    """Torch's version, and the CUDA version that it was built for."""
    began = time.monotonic()
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda, "seconds": time.monotonic() - began}


def vllm() -> dict[str, Any]:
    """vLLM's version, and the kind of device that it finds."""
    began = time.monotonic()
    import vllm
    from vllm.platforms import current_platform

    return {
        "version": vllm.__version__,
        "device": current_platform.device_type,
        "seconds": time.monotonic() - began,
    }


def model(name: str, revision: str) -> dict[str, Any]:
    """The model's directory, made as a run would but not downloaded, and its parameters by the headers of its
    safetensors files."""
    from inflight.models import ModelError, NotDownloaded, cached, hub

    try:
        directory = cached(name, revision)
    except NotDownloaded as error:
        return {"error": str(error), "absent": True, "offline": hub.is_offline()}
    except ModelError as error:
        return {"error": str(error)}
    return {"directory": str(directory), "parameters": sum(map(_parameters, directory.glob("*.safetensors")))}


def _parameters(path: Path) -> int:
    """Elements of all tensors of a safetensors file."""
    with safe_open(path, framework="numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping


def cuda() -> dict[str, Any]:
    """Initialises CUDA and computes on every visible GPU: name, free and total bytes, peers that it can address."""
    import torch

    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        with torch.cuda.device(index):
            value = float(torch.ones(64, device="cuda").sum())
            free, total = torch.cuda.mem_get_info()
        peers = [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
        name = torch.cuda.get_device_name(index)
        found.append({"name": name, "free": free, "total": total, "peers": peers, "computes": value == 64.0})
    return {"devices": found}


def memory() -> dict[str, Any]:
    """Free bytes of each GPU by its index, as the driver counts them."""
    query = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=OPEN_TIMEOUT_S, check=True)
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return {"free": {index.strip(): int(free) << 20 for index, free in rows}}


def ipc() -> dict[str, Any]:
    """Exports memory of the first visible GPU over CUDA IPC and has another process copy it to each visible GPU."""
    import torch

    from inflight.weights.transport.base import TransportError
    from inflight.weights.transport.ipc import export

    buffer = torch.full((PATTERN_BYTES,), PATTERN, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    try:
        offer = export(buffer).hex()
    except TransportError as error:
        return {"failed": {"0": str(error)}}
    failed = {}
    for index in range(torch.cuda.device_count()):
        problem = _opened_elsewhere(offer, index)
        if problem:
            failed[str(index)] = problem
    return {"failed": failed, "devices": torch.cuda.device_count()}


def _opened_elsewhere(offer: str, device: int) -> str:
    """Why a second process could not read the memory into this GPU; empty: it could."""
    command = [sys.executable, "-m", "inflight.doctor.probes", os.devnull, "ipc_reader", offer, str(device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=OPEN_TIMEOUT_S, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]


def ipc_reader(offer: str, device: str) -> dict[str, Any]:
    """The other process of `ipc`. Raises when the memory can't be opened, can't be copied as a pull does, or holds
    something else."""
    import torch

    from inflight.weights.transport import cuda
    from inflight.weights.transport.ipc import opened
    from inflight.weights.transport.scatter import CopyRegion

    target = torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    cuda.bind(target.device)
    stream = torch.cuda.Stream(target.device)
    stream.wait_stream(torch.cuda.current_stream(target.device))
    source = opened(bytes.fromhex(offer))
    cuda.copy_in_one_call([CopyRegion(0, 0, PATTERN_BYTES)], source, target.data_ptr(), stream.cuda_stream)
    stream.synchronize()
    if not bool((target == PATTERN).all()):
        raise RuntimeError("what was read is not what was written")
    return {}


PROBES = {probe.__name__: probe for probe in (torch, vllm, model, cuda, memory, ipc, ipc_reader)}


def main(answer: str, name: str, *arguments: str) -> None:
    """Writes what the probe returns."""
    found = PROBES[name](*arguments)
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
