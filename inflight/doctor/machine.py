"""The machine: cores, limits, shared memory, ports."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from inflight.config import SERVICES, ConfigError, RunConfig
from inflight.doctor.finding import Finding, fail, ok, warn
from inflight.launcher import devices

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 1 << 30
"""vLLM's processes share queues there: about 0.25 GiB for each generator. Containers get 64 MiB by default."""
LEAST_FILES = 4096
LEAST_PROCESSES = 4096
GIB = 1 << 30


def cores(config: RunConfig | None) -> Iterator[Finding]:
    """Cores that this process may use, and whether the configured ones are there."""
    count = len(os.sched_getaffinity(0))
    try:
        if config is not None:
            devices.require_cores(config)
    except ConfigError as error:
        yield fail("cores", str(error), "correct launch.affinity")
        return
    if count < 2:
        yield warn("cores", str(count), "trainer and generator will share one core; 2 or more are better")
    else:
        yield ok("cores", str(count))


def limits(config: RunConfig | None) -> Iterator[Finding]:
    """Open files and processes: each request under way is a connection; launchers raise the soft limit to the hard."""
    wanted = LEAST_FILES if config is None else 512 + 4 * config.rollout.concurrency * config.rollout.group_size
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    for name, limit, least, option in (
        ("open files", files, wanted, "n"),
        ("processes", processes, LEAST_PROCESSES, "u"),
    ):
        text = "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit}, {least} are enough"
        if limit != resource.RLIM_INFINITY and limit < least:
            yield fail(name, text, f"raise the hard limit: `ulimit -H{option} {least}`, or /etc/security/limits.conf")
        else:
            yield ok(name, text)


def shared_memory(folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """What vLLM's and torch's processes exchange data through."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield fail("shared memory", f"{folder}: {error.strerror}", f"mount a tmpfs at {folder}")
        return
    text = f"{free / GIB:.2g} GiB free in {folder}"
    if free < LEAST_SHARED_BYTES:
        yield fail("shared memory", text, "give it 1 GiB or more; in a container: --shm-size=2g or --ipc=host")
    else:
        yield ok("shared memory", text)


def ports(config: RunConfig | None) -> Iterator[Finding]:
    """Loopback, which generators and transports use, and the control sockets' ports if they have any."""
    problem = _bindable("127.0.0.1", 0)
    if problem:
        yield fail("loopback", f"can't listen on 127.0.0.1: {problem}", "bring the interface lo up")
    else:
        yield ok("loopback", "generators can serve on 127.0.0.1")
    if config is None or not config.over_tcp:
        return
    address = config.network.bind or config.bus.address
    taken = []
    for offset, service in enumerate(SERVICES):
        port = config.bus.port + offset
        problem = _bindable(address, port)
        if problem:
            taken.append(f"{port} ({service}): {problem}")
    name = "control ports"
    if taken:
        yield fail(name, f"{address}: {', '.join(taken)}", "another bus.port, or an address of this host")
    else:
        yield ok(name, f"{address}, {config.bus.port} to {config.bus.port + len(SERVICES) - 1} are free")


def _bindable(address: str, port: int) -> str:
    """Why nothing can listen there; empty: it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((address, port))
            tried.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""
