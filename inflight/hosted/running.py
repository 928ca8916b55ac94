"""Runs the process of a parcel as a child, with the GPUs of its slot, until it ends or its lease does."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from inflight import config as configuration
from inflight.bus.keys import for_owner_alone
from inflight.config import ConfigError, RunConfig
from inflight.exits import STOPPED
from inflight.hosted.folder import Predecessors, unpacked_folder, with_model
from inflight.launcher.devices import available
from inflight.processes import THERE_S, Processes
from inflight.starters.base import Command
from inflight.starters.parcel import Parcel

POLL_S = 0.2
T = TypeVar("T")
MODULES = {"generator": "inflight.generator", "actor": "inflight.actor"}


class Held(Protocol):
    """A lease: parcel.Lease, or that of a process that has joined."""

    @property
    def ended(self) -> str:
        """Why it is over; empty while it is valid."""

    def wait(self, timeout_s: float) -> bool:
        """Waits, at most for `timeout_s`; False when it is over."""


def run(parcel: Parcel, lease_of: Callable[[float], Held]) -> int:
    """Returns the exit code of the process; STOPPED when its lease ended first. `lease_of` takes the lease's time in
    seconds. Raises ConfigError, ModelError or OSError when it can't be started."""
    before = Predecessors(parcel)
    with unpacked_folder(parcel) as config:
        lease = lease_of(config.hosts.lease_s)
        ready = _leased(lease, functools.partial(_prepared, config, before))
        code = None if ready is None else _run_leased(lease, ready, _command(parcel, ready))
    if code is not None:
        return code
    print(f"inflight hosted: {parcel.name} ends: {lease.ended}", file=sys.stderr, flush=True)
    return STOPPED


def _command(parcel: Parcel, config: RunConfig) -> Command:
    """Of the process, in its folder here. Raises ConfigError when this host has too few GPUs."""
    return Command(
        name=parcel.name,
        kind=parcel.kind,
        argv=[sys.executable, "-m", MODULES[parcel.kind], "--run-dir", config.run_dir, "--name", parcel.name],
        log=None,
        environment=parcel.environment | _gpus(config, parcel, available()),
    )


def _run_leased(lease: Held, config: RunConfig, command: Command) -> int | None:
    """The exit code of the process, as a shell has it; None when the lease ended first. The process and all its
    descendants have ended then."""
    with for_owner_alone():
        configuration.save(config)
    with Processes(config.launch.stop_grace_s) as processes:
        processes.start(command)
        while lease.wait(POLL_S):
            if ended := processes.ended():
                return ended[0].code if ended[0].code >= 0 else 128 - ended[0].code
    return None


def _prepared(config: RunConfig, before: Predecessors) -> RunConfig:
    """Does what may take long before the process is started; returns the configuration with the model of this host. A
    predecessor that does not even end with its lease is not waited for. Raises ModelError."""
    ready = with_model(config)
    within_s = config.hosts.lease_s + config.launch.stop_grace_s + THERE_S
    if not before.ended(within_s):
        print(f"inflight hosted: its predecessor has not ended within {within_s:g} s", file=sys.stderr, flush=True)
    return ready


def _leased(lease: Held, work: Callable[[], T]) -> T | None:
    """The result of `work`, which a thread does. None when the lease ended first: the thread, which may be in a
    download, is left to end by itself, or with this process. Raises what `work` raises."""
    done: Future[T] = Future()

    def do() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `done.result`
            done.set_exception(error)

    threading.Thread(target=do, name="preparing", daemon=True).start()
    while lease.wait(POLL_S):
        if done.done():
            return done.result()
    return None


def _gpus(config: RunConfig, parcel: Parcel, devices: list[str]) -> dict[str, str]:
    """Those of a generator's slot; none on a host without. Raises ConfigError when there are too few."""
    if not devices or parcel.kind != "generator":
        return {}
    ranks = config.generator.tensor_parallel_size
    own = devices[parcel.slot * ranks : (parcel.slot + 1) * ranks]
    if len(own) < ranks:
        raise ConfigError(
            f"{parcel.name} is generator {parcel.slot + 1} of this host and takes {ranks} GPUs, of {len(devices)} here"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
