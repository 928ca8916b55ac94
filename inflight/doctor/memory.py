"""Whether a configured model, its optimizer and its shadows fit into memory."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from inflight.config import ConfigError, RunConfig
from inflight.doctor.finding import Finding, fail, ok, warn
from inflight.doctor.probe import ProbeError, ask
from inflight.launcher import devices

MODEL_S = 300.0
QUERY_S = 30.0
GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER_BYTES = 16
"""Per parameter in the trainer: float32 weights, gradients and Adam's two moments."""
ENGINE_BYTES = 2 * GIB
TRAINER_BYTES = 2 * GIB
"""Beside what is counted: CUDA contexts, graphs, activations; measured with models of 0.1 to 7 billion parameters they
are of this order."""
PROCESS_BYTES = GIB
"""Of a process on the CPU beside what is counted: its libraries."""


def model(config: RunConfig) -> tuple[int | None, Finding]:
    """Parameters of the configured model, which is made as a run would but not downloaded, and a line about it."""
    try:
        found = ask("model", [config.model.name, config.model.revision], timeout_s=MODEL_S)
    except ProbeError as error:
        return None, fail("model", f"{config.model.name}: {error}", f"`inflight model {config.model.name}`")
    if found.get("absent"):
        return None, _not_downloaded(config, str(found["error"]), offline=bool(found.get("offline")))
    if "error" in found:
        return None, fail("model", found["error"], "correct model.name")
    count = int(found["parameters"])
    if not count:
        return None, warn("model", f"{found['directory']} holds no safetensors", "memory can't be estimated")
    return count, ok("model", f"{count / 1e9:.3g} billion parameters, {config.model.dtype}, {found['directory']}")


def _not_downloaded(config: RunConfig, why: str, *, offline: bool) -> Finding:
    """A run downloads the model when it starts, where that is allowed."""
    if offline:
        return fail("model", why, "unset HF_HUB_OFFLINE, or download the model where the hub can be reached")
    revision = f" --revision {config.model.revision}" if config.model.revision else ""
    text = f"{config.model.name} is not on this machine, or not completely: a run downloads it when it starts"
    todo = f"to estimate memory and disk, download it first: `inflight model {config.model.name}{revision}`"
    return warn("model", text, todo)


def trainer_bytes(parameters: int, config: RunConfig, rank: int = 0) -> int:
    """Of one of the trainer's processes: its share of the float32 state, the twin that computes if the weights are not
    sharded, and of rank 0 the send buffer."""
    processes = config.trainer.processes
    whole = BYTES[config.model.dtype] * parameters
    twin = whole if processes == 1 and config.model.dtype != "float32" else 0
    return MASTER_BYTES * parameters // processes + twin + (0 if rank else whole)


def generator_bytes(parameters: int, config: RunConfig) -> int:
    """Of one rank of a generator: its share of the live weights and of the shadow, and the KV cache."""
    sets = 1 if config.generator.swap == "host" else 2
    weights = sets * BYTES[config.model.dtype] * parameters // config.generator.tensor_parallel_size
    return weights + int(config.generator.kv_cache_gib * GIB)


def on_cpu(parameters: int, config: RunConfig) -> Iterator[Finding]:
    """All processes of a run against the memory that is there."""
    generators = config.generator.count * config.generator.tensor_parallel_size
    ranks = range(config.trainer.processes)
    needed = sum(trainer_bytes(parameters, config, rank) + PROCESS_BYTES for rank in ranks)
    needed += generators * (generator_bytes(parameters, config) + PROCESS_BYTES)
    yield _compared("memory", needed, available_bytes(), "the machine", ", without activations")


def on_gpus(parameters: int, config: RunConfig, there: Sequence[str]) -> Iterator[Finding]:
    """Each GPU's processes against its memory."""
    try:
        seen = devices.assign(config, list(there))
    except ConfigError as error:
        yield fail("GPU memory", str(error), "fewer processes, or more GPUs")
        return
    needed: defaultdict[str, int] = defaultdict(int)
    ranks = config.rank_names()
    for name, visible in seen.items():
        own = visible.split(",")
        if name in ranks:
            needed[own[0]] += trainer_bytes(parameters, config, ranks.index(name)) + TRAINER_BYTES
            continue
        for rank in range(config.generator.tensor_parallel_size):
            needed[own[rank]] += generator_bytes(parameters, config) + ENGINE_BYTES
    free = _free_bytes()
    for device, count in sorted(needed.items()):
        yield _compared(f"memory of GPU {device}", count, free.get(device), f"GPU {device}")


def on_disk(parameters: int, config: RunConfig) -> Iterator[Finding]:
    """What the run folder will hold: checkpoints and, if they are kept, versions."""
    folder = config.path
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    steps = config.trainer.steps
    every = config.trainer.checkpoint_every
    kept = config.trainer.checkpoints_kept
    checkpoints = steps // every + 1 if every else 1
    checkpoints = min(checkpoints, kept + 1) if kept else checkpoints
    versions = (steps + 1) * BYTES[config.model.dtype] if config.audit.keep_versions else 0
    each = 12 if config.trainer.checkpoint_dtype == "float32" else 14  # float32 weights, Adam's moments; model files
    needed = parameters * (each * checkpoints + versions)
    text = f"about {_gib(needed)} for {checkpoints} checkpoint{'s' if checkpoints > 1 else ''}"
    text += f" and {steps + 1} versions" if versions else ""
    text += f", {_gib(free)} free in {folder}"
    if needed > free:
        yield fail("disk", text, "another run_dir, trainer.checkpoints_kept=2, or audit.keep_versions=false")
    else:
        yield ok("disk", text)


def available_bytes() -> int | None:
    """What the machine, or the container, can still give; None where that is not known."""
    lines = _text(Path("/proc/meminfo")).splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit = _text(Path("/sys/fs/cgroup/memory.max"))
    used = _text(Path("/sys/fs/cgroup/memory.current"))
    if limit.strip().isdigit() and used.strip().isdigit():
        found.append(int(limit) - int(used))
    return min(found, default=None)


def _compared(name: str, needed: int, free: int | None, where: str, beside: str = "") -> Finding:
    """`beside`: what the estimate does not count."""
    text = f"about {_gib(needed)} for weights, shadow, optimizer and KV cache{beside}"
    if free is None:
        return warn(name, text, f"how much {where} has is not known")
    text += f", {_gib(free)} free"
    if needed > free:
        todo = "a smaller model, generator.kv_cache_gib, more GPUs or trainer.processes; generator.swap=host on a GPU"
        return fail(name, text, todo)
    if needed > 0.9 * free:
        return warn(name, text, "long sequences or a large trainer.micro_batch may not fit")
    return ok(name, text)


def _free_bytes() -> dict[str, int]:
    try:
        rows = ask("memory", timeout_s=QUERY_S)["free"]
    except ProbeError:
        return {}
    return {str(index): int(free) for index, free in rows.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(count: int) -> str:
    return f"{count / GIB:.3g} GiB"
