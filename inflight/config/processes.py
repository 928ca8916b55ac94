"""Options of the control sockets, and of the launcher and the processes that it supervises."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.config.checks import require, require_fields
from inflight.config.network import is_address


@dataclass(frozen=True)
class BusConfig:
    """Control sockets: Unix sockets in the run folder, unless `address` is set."""

    address: str = ""
    """An IP address of this host to listen on instead, with CURVE keys that the launcher makes."""
    port: int = 5700
    """The first of six consecutive ports: weights, rollouts, status, the trainer's ranks, the evaluator, and hosts that
    join."""
    keys: str = ""
    """Folder of the CURVE keys; made by the launcher if there is an `address`."""
    heartbeat_s: float = 1.0
    dead_after_s: float = 30.0
    """Seconds without a message after which a peer is presumed dead."""

    def __post_init__(self) -> None:
        require(1024 <= self.port <= 65530, "bus.port", self.port, "1024 to 65530")
        require(not self.address or is_address(self.address), "bus.address", self.address, "an IP address, or empty")
        require_fields(self, "bus", "heartbeat_s dead_after_s")
        fits = self.heartbeat_s < self.dead_after_s
        require(fits, "bus.heartbeat_s", self.heartbeat_s, "below bus.dead_after_s")


@dataclass(frozen=True)
class LaunchConfig:
    """The launcher and the processes that it supervises."""

    affinity: dict[str, list[int]] = field(default_factory=dict)
    """CPU cores of a process, by its name (`g0`) or its kind (`trainer`, `generator`, `actor`); absent: all."""
    needs_gpu: bool = False
    """Refuse to start without a GPU, as `machine=gpu` does; otherwise a run uses the GPUs that there are."""
    stop_grace_s: float = 6.0
    """Seconds between SIGTERM and SIGKILL when the run ends."""
    restarts: int = 3
    """How often a generator or an actor that had worked is restarted; the run ends at the next failure."""
    restart_delay_s: float = 1.0
    """Seconds before the first restart of a process; doubled before each further one."""
    line_every_s: float = 5.0
    """Seconds between the lines of progress if the output is no terminal; 1 or more."""
    log_mib: float = 64.0
    """MiB of a process's log in `logs/` with which it begins anew; what it held is kept in one older file (`g0.log.1`).
    1 or more."""
    metrics: bool = True
    """Each process serves metrics to Prometheus (docs/metrics.md)."""

    def __post_init__(self) -> None:
        require(0 < self.stop_grace_s <= 8, "launch.stop_grace_s", self.stop_grace_s, "above 0, at most 8")
        require_fields(self, "launch", "line_every_s log_mib", least=1)
        require_fields(self, "launch", "restart_delay_s", least=0)
        require_fields(self, "launch", "restarts", least=0, most=1000)
